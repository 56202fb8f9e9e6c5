"""The store on MemCache: the memory that processes of one or several hosts give, and a MetaService that knows what lies where."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvpool.options.environment import merge_qos
from kvpool.options.memcache_conf import LocalConf
from kvpool.stores.base import (
    MISS,
    UNKNOWN,
    Answer,
    Batch,
    Capabilities,
    Health,
    Hit,
    Lease,
    Reader,
    Result,
    Status,
    StoreStats,
    Tier,
    Writer,
)
from kvpool.stores.context import StoreContext
from kvpool.stores.memcache import codes, connect
from kvpool.stores.memcache.closing import PROBE_KEY
from kvpool.stores.memcache.directions import directions
from kvpool.stores.memcache.half_written import HalfWritten
from kvpool.stores.memcache.leases import SHORTEST_S, Leases
from kvpool.stores.memcache.library import Client, KeyInfo
from kvpool.stores.memcache.metrics import MetaHttp, metrics_url
from kvpool.stores.memcache.ranged import MemcacheReader, MemcacheWriter
from kvpool.stores.memcache.room import Room
from kvpool.stores.memcache.states import PLAIN
from kvpool.stores.native import Transfer
from kvpool.stores.opaque import BUSY, FATAL_CLOSED, Limits, OpaqueStore, take

logger = logging.getLogger(__name__)

LOOKS_ONLY = Result(Status.FATAL, text="this client only looks up: it was opened for the scheduler or for a tool")
TOO_MUCH = Result(Status.NO_SPACE, text="the batch is too large for the pool: it would push out its own beginning")
ROOM_S = 1.0
"""How long a put waits for the pool to make room: it evicts in the background, once it is nearly full."""
PUT_LEASE_S = 30.0
SSD = 2  # a medium of the library


class MemcacheStore(OpaqueStore):
    """``http_url`` is metrics_url of mmc-meta.conf, by default that of MMC_META_CONFIG_PATH: with it the store can tell how full
    the pool is, list and clear. A ``scheduler`` or ``tool`` only looks up, lists and removes."""

    name = "memcache"
    limits = Limits(batch_keys=256, batch_bytes=64 << 20)

    def __init__(
        self,
        options: LocalConf,
        context: StoreContext,
        conf_path: str,
        *,
        http_url: str | None = None,
        qos_priority: int | None = None,
        connect_s: float = 30.0,
    ) -> None:
        super().__init__()
        self._options, self._context = options, context
        self._directions = directions(context.device)
        moves = context.role in ("worker", "owner")
        self._wish = connect.Wish(conf_path, context.device_id, moves)
        self._qos = qos_priority
        self._connect_s = connect_s
        self._client: Client | None = None
        http_url = http_url or metrics_url(os.environ, options.meta_service_url)
        self._http = MetaHttp(http_url) if http_url else None
        self._room = Room(self._http)
        self._leases = Leases()
        self._half_written = HalfWritten()
        self._bound = threading.local()
        self._registered: set[tuple[int, int]] = set()
        self.capabilities = Capabilities(
            ranged=moves,
            listable=self._http is not None,
            device_memory=context.device == "npu",
            leases=True,
            host_bound=options.protocol == "host_shm",
            max_key_len=255,
        )

    # life

    def _connect(self) -> None:
        merged = merge_qos(self.name, self._qos, os.environ)
        for warning in merged.warnings:
            logger.warning("kvpool: %s", warning)
        os.environ.update(merged.updates)
        self._client = connect.acquire(self._options, self._wish, self._connect_s)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            connect.release(client)

    def _library(self) -> Client:
        """The client, ready to be called from this thread."""
        client = self._client
        if client is None:
            raise OSError("the store is closed")
        if self._context.device == "npu" and not hasattr(self._bound, "device"):
            import torch

            torch.npu.set_device(self._context.device_id)
            self._bound.device = self._context.device_id
        return client

    def _takes_host_memory(self) -> bool:
        return self._wish.data and self._context.device == "cpu" and self._options.protocol == "host_shm"

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """OSError where the library refuses a region; memory of this host needs none with ``host_shm``."""
        if self._options.protocol == "host_shm":
            return
        client = self._library()
        for address, nbytes in regions:
            if (address, nbytes) in self._registered:
                continue
            code = client.register_buffer(address, nbytes)
            if code != 0:
                raise OSError(f"MemCache: {nbytes} bytes at {address:#x} cannot be registered: code {code} ({codes.text_of(code)})")
            self._registered.add((address, nbytes))

    # lookups

    def _exists(self, keys: Sequence[bytes]) -> list[Answer]:
        client, names = self._library(), texts(keys)
        found = client.batch_is_exist(names)
        there = [name for name, code in zip(names, found, strict=True) if code == 1]
        self._half_written.forget(there)
        infos = iter(client.batch_get_key_info(there, PLAIN) if there else [])
        return [_answer(next(infos)) if code == 1 else (MISS if code == 0 else UNKNOWN) for code in found]

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        """``until`` is now where ``seconds`` are too few for a lease of the library."""
        lookups, until = self._lookups, time.monotonic() + seconds
        if seconds < SHORTEST_S:
            return super().lease(keys, 0.0)
        if lookups is None or not keys:
            return Lease(keys, [UNKNOWN] * len(keys), until)
        try:
            token, answers = lookups.ask(lambda: self._lease(keys, seconds), self.limits.lookup_s)
        except Exception:  # noqa: BLE001 - what cannot be leased is no hit
            return Lease(keys, [UNKNOWN] * len(keys), until)
        return Lease(keys, answers, until, token)

    def _lease(self, keys: Sequence[bytes], seconds: float) -> tuple[int, list[Answer]]:
        client, names = self._library(), texts(keys)
        token, found = self._leases.take(client, names, seconds)
        held = [name for name, code in zip(names, found, strict=True) if code == 0]
        self._half_written.forget(held)
        infos = iter(client.batch_get_key_info(held, PLAIN) if held else [])
        absent = {codes.NO_SUCH_KEY: MISS, codes.BEING_WRITTEN: MISS}
        return token, [_answer(next(infos)) if code == 0 else absent.get(code, UNKNOWN) for code in found]

    def release(self, lease: Lease) -> None:
        token, lease.token = lease.token, None
        lookups = self._lookups
        if isinstance(token, int) and lookups is not None:
            with suppress(Exception):  # it runs out by itself
                lookups.ask(lambda: self._leases.give(self._library(), token), self.limits.lookup_s)

    # transfers

    def _in_parts(self, batch: Batch, until: float, work: Callable[[Batch], list[Result]]) -> list[Result]:
        if not self._wish.data:
            return [LOOKS_ONLY] * len(batch.keys)
        fits = self._room.objects(batch.object_nbytes) if work == self._store else len(batch.keys)
        results = super()._in_parts(take(batch, range(min(fits, len(batch.keys)))), until, work)
        return results + [TOO_MUCH] * (len(batch.keys) - len(results))

    def _store(self, batch: Batch, there: Sequence[Answer] | None = None) -> list[Result]:
        """As everywhere. What is there already is leased meanwhile, so that the rest does not push it out (BC-080); and a key whose
        writer died is given free and put once more."""
        self._leases.end_overdue(self._library())
        there = self._look(batch.keys) if there is None else there
        hits = [key for key, answer in zip(batch.keys, there, strict=True) if isinstance(answer, Hit)]
        token, found = self._leases.take(self._library(), texts(hits), PUT_LEASE_S) if hits else (None, [])
        try:
            results = super()._store(batch, None if any(found) else there)  # one that could not be leased may have gone
            busy = {name: row for row, name in enumerate(texts(batch.keys)) if results[row] is BUSY}
            again = [busy[name] for name in self._half_written.free(self._library(), list(busy))] if busy else []
            for row, result in zip(again, super()._store(take(batch, again)) if again else [], strict=True):
                results[row] = result
        finally:
            if token is not None:
                self._leases.give(self._library(), token)
        return results

    def _put(self, batch: Batch) -> list[Result]:
        end = time.monotonic() + ROOM_S
        results = self._put_once(batch)
        while time.monotonic() < end and (full := [row for row, r in enumerate(results) if r.status is Status.NO_SPACE]):
            time.sleep(0.01)
            for row, result in zip(full, self._put_once(take(batch, full)), strict=True):
                results[row] = result
        return results

    def _put_once(self, batch: Batch) -> list[Result]:
        lengths: list[int] = batch.sizes.tolist()
        found = self._library().batch_put_from_layers(
            texts(batch.keys), batch.addresses.tolist(), [lengths] * len(batch.keys), self._directions.put
        )
        return [codes.put_result(code, batch.object_nbytes) for code in found]

    def _get(self, batch: Batch) -> list[Result]:
        lengths: list[int] = batch.sizes.tolist()
        found = self._library().batch_get_into_layers(
            texts(batch.keys), batch.addresses.tolist(), [lengths] * len(batch.keys), self._directions.get
        )
        return [codes.get_result(code, batch.object_nbytes) for code in found]

    def _remove(self, keys: Sequence[bytes]) -> list[Result]:
        return [codes.remove_result(code) for code in self._library().remove_batch(texts(keys))]

    # pieces

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        if nbytes <= 0:
            raise ValueError(f"an object must have at least one byte, not {nbytes}")
        if not all(map(self._possible, keys)):
            raise ValueError(f"keys have 1 to {self.capabilities.max_key_len} bytes")
        if not self._wish.data:
            raise ValueError(LOOKS_ONLY.text)
        writer = MemcacheWriter(self._session, self._directions, texts(keys), nbytes, deadline_s)
        writer.begin()
        return writer

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        reader = MemcacheReader(self._session, self._directions, self._leases, texts(keys), deadline_s)
        reader.begin()
        return reader

    def _session(self, work: Callable[[Client], list[Result]], count: int, until: float) -> list[Result]:
        """See ``ranged.Calls``. It waits as long as the library takes: the memory is in use till then."""
        transfers = self._transfers
        if transfers is None:
            return [FATAL_CLOSED] * count
        call = transfers.begin(lambda: work(self._library()), until - time.monotonic())
        while not call.wait(60.0):
            pass
        return Transfer(call, count, self._fault).results()

    # the rest

    def list(self, prefix: bytes = b"") -> list[bytes]:
        """Empty when the MetaService does not answer."""
        lookups, http = self._lookups, self._http
        if http is None:
            return super().list(prefix)
        if lookups is None:
            return []
        with suppress(OSError):
            return lookups.ask(lambda: http.keys(prefix), 10.0)
        return []

    def clear(self, prefix: bytes) -> int:
        keys = self.list(prefix)
        step = self.limits.exists_keys
        results = [result for first in range(0, len(keys), step) for result in self.remove(keys[first : first + step])]
        return sum(result.status is Status.OK for result in results)

    def _stats(self) -> StoreStats:
        if self._http is None:
            return StoreStats(leases=self._leases.count())
        usage = self._http.usage()
        return StoreStats(usage.capacity, usage.used, leases=self._leases.count())

    def _health(self) -> Health:
        code = self._library().batch_is_exist([PROBE_KEY])[0]
        return Health(True) if code in (0, 1) else Health(False, f"{codes.text_of(code)} (code {code})")


def texts(keys: Sequence[bytes]) -> list[str]:
    """Keys as the library takes them."""
    return [key.decode() for key in keys]


def _answer(info: KeyInfo) -> Answer:
    """What the library says of an object that was there a moment ago."""
    media = info.type_list()
    if info.size() <= 0 or not media:
        return MISS
    return Hit(Tier.DISK if all(medium == SSD for medium in media) else Tier.DRAM, info.size())
