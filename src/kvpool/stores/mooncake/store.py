"""Mooncake behind the store contract.

Bytes move straight between the caller's segments and the memory of whichever client holds the object. The library is thread-safe; a
call that has begun cannot be abandoned. Over TCP, where the CPU can read the KV, every object ends with a checksum
(kvpool.stores.checksums): any other protocol would need its memory registered.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_ssd import READERS
from kvpool.stores.base import (
    MISS,
    UNKNOWN,
    Answer,
    Batch,
    Capabilities,
    Handle,
    Health,
    Hit,
    Reader,
    Result,
    Status,
    StoreStats,
    Tier,
    TierStats,
    Writer,
)
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import codes, ssd
from kvpool.stores.mooncake.client import Client, name_of
from kvpool.stores.mooncake.connect import connect, fabric_memory, segment_bytes
from kvpool.stores.mooncake.library import Library, load
from kvpool.stores.mooncake.reader import MooncakeReader
from kvpool.stores.mooncake.room import through_buffer, with_room
from kvpool.stores.mooncake.sessions import Link
from kvpool.stores.mooncake.upkeep import Upkeep
from kvpool.stores.mooncake.writer import MooncakeWriter
from kvpool.stores.native import Closed, NativeCalls
from kvpool.stores.opaque import Limits, OpaqueStore, take

logger = logging.getLogger(__name__)


class MooncakeStore(OpaqueStore):
    """``load_deadline_s``: of the engine's loads, compared with the master's lease. Writers and readers need Mooncake 0.3.13."""

    name = "mooncake"

    def __init__(self, options: MooncakeOptions, context: StoreContext, *, load_deadline_s: float | None = None) -> None:
        super().__init__()
        self.options = options
        self.context = context
        self.checksums = self._takes_host_memory()
        self.capabilities = Capabilities(ranged=True, leases=True, device_memory=context.device != "cpu")
        self.limits = Limits(transfer_threads=READERS, batch_bytes=self._batch_bytes())
        self._load_deadline_s = load_deadline_s
        self._library: Library | None = None
        self._client: Client | None = None
        self._upkeep: Upkeep | None = None
        self._link: Link | None = None
        self._regions: set[tuple[int, int]] = set()
        self._closing = threading.Event()

    def _batch_bytes(self) -> int:
        ours = Limits().batch_bytes
        return min(ours, ssd.read_limit(os.environ, READERS)) if self.options.enable_ssd_offload else ours

    # life

    def open(self) -> None:
        """Also begins what runs in the background: the pool's memory is mapped, the master's lease is measured."""
        super().open()
        with self._life:
            if self._link is not None or self._transfers is None or self._lookups is None or self._client is None:
                return
            self._closing.clear()
            self._link = self._make_link(self._client, self._transfers, self._placement(self._client))
            self._upkeep = Upkeep(self._client, self._lookups, self._library, self.options, self.context, self._load_deadline_s)
            self._upkeep.start()

    def _connect(self) -> None:
        self._library = load(self.context.device, tenants=bool(self.options.tenant_argument))
        self.capabilities = replace(self.capabilities, ranged=self._library.has_ranges)
        client = connect(self._library, self.options, self.context, os.environ)
        try:
            self._check_tenant(client, self._library)
            for address, nbytes in sorted(self._regions):
                self._register(client, address, nbytes)
        except BaseException:
            self._end(client)
            raise
        self._client = client

    def _check_tenant(self, client: Client, library: Library) -> None:
        """A master in strict mode takes nothing from a tenant it does not know: said at once, not with every put."""
        probe = f"kvpool-tenant:{self.context.rank}:{os.getpid()}:{time.time_ns()}"
        if client.put(probe, b"kvpool", library.put_config()) == codes.UNKNOWN_TENANT:
            raise OSError(
                f"the Mooncake master at {self.options.master_server_address} has no quota for "
                f"tenant_id={self.options.tenant_id!r}: "
                "add it to the tenant policy, or use a tenant that is there"
            )
        client.remove(probe, True)

    def close(self) -> None:
        """Ends what runs in the background first. Writers that are still open are revoked."""
        self._closing.set()
        upkeep, self._upkeep = self._upkeep, None
        if upkeep is not None:
            upkeep.stop(self.limits.close_s)
        super().close()
        self._link = None

    def _disconnect(self) -> None:
        """Takes about a second, for which the library keeps the interpreter lock."""
        client, link, self._client = self._client, self._link, None
        if client is None:
            return
        if link is not None and (writing := link.books.writing()):
            client.batch_put_session_revoke([name_of(key) for key in writing])
        self._end(client)

    def _end(self, client: Client) -> None:
        client.close()
        if self.options.enable_ssd_offload and segment_bytes(self.options, self.context):
            ssd.good_bye(ssd.folder_of(self.options, self.context))

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Needed by rdma and ascend; over tcp, and with fabric memory, the library takes any memory. OSError where it refuses."""
        lookups, client = self._lookups, self._client
        new = [region for region in regions if region not in self._regions]
        if self.options.protocol == "tcp" or fabric_memory(self.options, os.environ):
            return
        self._regions.update(new)
        if lookups is None or client is None:
            return
        for address, nbytes in new:
            self._register(client, address, nbytes)

    def _register(self, client: Client, address: int, nbytes: int) -> None:
        code = client.register_buffer(address, nbytes)
        if code != 0:
            raise OSError(f"Mooncake cannot register {nbytes} bytes at {address:#x}: code {code}, {codes.failure(code).text}")

    # whole objects

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        self._check(batch)
        until = time.monotonic() + deadline_s
        return self._begin(batch, deadline_s, lambda part: self._store_with_room(part, until))

    def _store_with_room(self, batch: Batch, until: float) -> list[Result]:
        return with_room(len(batch.keys), until, lambda rows: self._store(take(batch, rows)))

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        until = time.monotonic() + deadline_s
        return self._begin(batch, deadline_s, lambda part: self._fetch_through_buffer(part, until))

    def _fetch_through_buffer(self, batch: Batch, until: float) -> list[Result]:
        return through_buffer(len(batch.keys), until, lambda rows: self._fetch(take(batch, rows)), self._closing)

    def _put(self, batch: Batch) -> list[Result]:
        names, count = [name_of(key) for key in batch.keys], len(batch.keys)
        lengths = batch.sizes.tolist()
        put = self._open_client().batch_put_from_multi_buffers(
            names, batch.addresses.tolist(), [lengths] * count, self._placement(self._open_client())
        )
        return codes.put_results(put, count, batch.object_nbytes)

    def _get(self, batch: Batch) -> list[Result]:
        """What outlived its lease is read again alone: that takes less time."""
        client, names, places = self._open_client(), [name_of(key) for key in batch.keys], batch.addresses.tolist()
        count, lengths = len(names), batch.sizes.tolist()
        results = codes.get_results(
            client.batch_get_into_multi_buffers(names, places, [lengths] * count), count, batch.object_nbytes
        )
        for row, result in enumerate(results):
            if result.code == codes.LEASE_EXPIRED and count > 1:
                got = client.batch_get_into_multi_buffers([names[row]], [places[row]], [lengths])
                results[row] = codes.get_results(got, 1, batch.object_nbytes)[0]
        return results

    def _placement(self, client: Client) -> object:
        assert self._library is not None
        own = client.get_hostname() if self.options.preferred_segment and segment_bytes(self.options, self.context) else ""
        return self._library.put_config(same_node=self.options.prefer_alloc_in_same_node and not own, segment=own)

    def _exists(self, keys: Sequence[bytes]) -> list[Answer]:
        """Whether they are there is one question, how long they are another: only the first tells a miss from a failure."""
        client, names = self._open_client(), [name_of(key) for key in keys]
        there = client.batch_is_exist(names)
        codes.check_count(there, len(names))
        present = [name for name, code in zip(names, there, strict=True) if code == 1]
        replicas = client.batch_get_replica_desc(present) if present else {}
        answers: list[Answer] = []
        for name, code in zip(names, there, strict=True):
            if code == 1:
                answers.append(_hit(client, name, replicas.get(name, ())))
            else:
                answers.append(MISS if code == 0 else UNKNOWN)
        return answers

    def _remove(self, keys: Sequence[bytes]) -> list[Result]:
        """By force: an object is no longer found though somebody's lease on it still runs. Whoever reads it just then may read
        other bytes, which their checksum tells."""
        client = self._open_client()
        results = [client.remove(name_of(key), True) for key in keys]
        return [Result(Status.OK, code=0) if code == 0 else codes.failure(code) for code in results]

    def clear(self, prefix: bytes) -> int:
        """Works though the store is not ``listable``: the library can remove by pattern, but cannot list."""
        transfers = self._transfers
        if transfers is None:
            return 0
        pattern = "^" + re.escape(name_of(prefix))
        removed = transfers.ask(lambda: self._open_client().remove_by_regex(pattern, True), 60.0)
        if removed < 0:
            raise OSError(f"Mooncake could not clear {prefix!r}: code {removed}, {codes.failure(removed).text}")
        return removed

    # objects in pieces

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        if nbytes <= 0:
            raise ValueError(f"an object must have at least one byte, not {nbytes}")
        if not all(map(self._possible, keys)):
            raise ValueError(f"keys have 1 to {self.capabilities.max_key_len} bytes")
        return MooncakeWriter(self._link or self._no_link(), keys, nbytes, deadline_s)

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        return MooncakeReader(self._link or self._no_link(), keys, deadline_s)

    def _takes_host_memory(self) -> bool:
        return self.context.device == "cpu" and self.options.protocol == "tcp"

    def _make_link(self, client: Client, calls: NativeCalls, config: object) -> Link:
        host = self._takes_host_memory()
        fetch = self._fetch_through_buffer
        return Link(client, calls, config, self.checksums, host, self._fault, self._look, fetch, self._quarantine)

    def _no_link(self) -> Link:
        """Of a store that is not open: every call ends with Closed."""
        calls = NativeCalls(self.name, 0)
        calls.close(0.0)
        return self._make_link(cast(Client, None), calls, None)

    # the rest

    def _lease_s(self) -> float:
        upkeep = self._upkeep
        return upkeep.lease_s if upkeep is not None else 0.0

    def wait_mapped(self, timeout_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until the own memory is mapped, as far as it can be; True when it is."""
        end = time.monotonic() + timeout_s
        while (upkeep := self._upkeep) is not None and time.monotonic() < end and not (stop is not None and stop.is_set()):
            if upkeep.mapped.wait(0.1):
                return True
        return False

    def wait_lease(self, timeout_s: float) -> float | None:
        """Wait until the lease of the master is known: its seconds, rounded down; None when it is not known in time."""
        upkeep = self._upkeep
        return upkeep.lease_s if upkeep is not None and upkeep.lease_known.wait(timeout_s) else None

    def _stats(self) -> StoreStats:
        """The library tells neither capacity nor use; the master's metrics port does."""
        link = self._link
        tiers = (TierStats(Tier.REMOTE, errors=self.damaged_objects),)
        return StoreStats(writing=len(link.books.writing()) if link is not None else 0, tiers=tiers)

    def _health(self) -> Health:
        """The library's own check notices late that a master is gone, so the master is asked something."""
        client = self._open_client()
        if client.health_check() == 0 and client.batch_is_exist(["kvpool-health"])[0] >= 0:
            return Health(True)
        return Health(False, f"the Mooncake master at {self.options.master_server_address} does not answer")

    def _open_client(self) -> Client:
        client = self._client
        if client is None:
            raise Closed("the store is closed")
        return client


def _hit(client: Client, name: str, replicas: Sequence[Any]) -> Answer:
    """Memory before disk. The length of what is only on a disk takes a question of its own."""
    for replica in replicas:
        if replica.is_memory_replica():
            return Hit(Tier.REMOTE, int(replica.get_memory_descriptor().buffer_descriptor.size))
    nbytes = client.get_size(name) if replicas else -1
    return Hit(Tier.DISK, nbytes) if nbytes >= 0 else UNKNOWN
