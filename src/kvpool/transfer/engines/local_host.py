"""Both sides on one host, no service: prefill puts what decode will read into a small local pool, decode gets it from there.

The pool is one of its own (never the one that keeps prefixes). What is published is leased until it is withdrawn or its time is up,
so that no transfer pushes out another one: where there is no room, the new one is refused. Prefill's blocks are free as soon as the
copy is made; the leases of a killed process end with it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.stores.base import Batch, Handle, Hit, Lease, Result, Status
from kvpool.transfer.base import Capabilities, StagedEngine

if TYPE_CHECKING:
    from kvpool.stores.base import Store
    from kvpool.transfer import EngineSettings

POOL = "transfer"
CLOSED = Result(Status.FATAL, text="the transfer engine is not open")
_UNSEEN = "decode does not see prefill's shared memory"


class LocalHostEngine(StagedEngine):
    """``address`` names the pool's folder by device and inode: the same for all who see the same shared memory."""

    name = "local_host"
    capabilities = Capabilities(one_host=True)

    def __init__(self, settings: EngineSettings) -> None:
        from kvpool.stores.local.pool_dir import default_root

        self._settings = settings
        self._folder: Path = (settings.root or default_root()) / POOL
        self._store: Store | None = None
        self._joined = b""  # the address of the pool that ``_store`` is
        self._lock = threading.Lock()
        self._leases: dict[str, list[Lease]] = {}  # transfer id -> what we have published of it

    def open(self, regions: Sequence[tuple[int, int]]) -> None:
        if self._settings.producer:
            self._store = self._open(self._settings.buffer_bytes)

    def _open(self, nbytes: int | None) -> Store:
        from kvpool.stores import make_local_store

        root, device = self._settings.root, self._settings.device
        store = make_local_store(root=root, name=POOL, dram_bytes=nbytes, on_last_close="remove", device=device)
        store.open()
        return store

    def address(self) -> bytes:
        place = os.stat(self._folder)
        return f"{place.st_dev}:{place.st_ino}".encode()

    def reach(self, address: bytes) -> str:
        try:
            if self.address() != address:
                return f"{_UNSEEN}: both must see one {self._folder}"
            with self._lock:
                if self._joined != address:  # the first time, or somebody has deleted the pool since
                    self.close()
                    self._store, self._joined = self._open(None), address
        except (OSError, ValueError) as error:
            return f"{_UNSEEN}: {error}"
        return ""

    def publish(self, transfer_id: str, batch: Batch, deadline_s: float) -> Result:
        store = self._store
        if store is None:
            return CLOSED
        self._forget_overdue()
        result = _outcome(store.put(batch, deadline_s))
        if result.status is Status.OK:
            lease = store.lease(batch.keys, self._settings.hold_s)
            if all(isinstance(answer, Hit) for answer in lease.answers):
                with self._lock:
                    self._leases.setdefault(transfer_id, []).append(lease)
                return result
            store.release(lease)
            result = Result(Status.NO_SPACE, text="it was pushed out before it was whole")
        store.remove(batch.keys)
        return result

    def fetch(self, batch: Batch, deadline_s: float) -> Result:
        store = self._store
        return CLOSED if store is None else _outcome(store.get(batch, deadline_s))

    def withdraw(self, transfer_id: str) -> None:
        with self._lock:
            leases = self._leases.pop(transfer_id, [])
        if self._store is not None:
            for lease in leases:
                self._store.release(lease)
                self._store.remove(lease.keys)

    def _forget_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [transfer_id for transfer_id, leases in self._leases.items() if leases[-1].until <= now]
        for transfer_id in overdue:
            self.withdraw(transfer_id)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _outcome(handle: Handle) -> Result:
    """All bytes, or the first that went wrong. The local store's calls are done when they return."""
    results = handle.results()
    bad = next((r for r in results if r.status is not Status.OK), None)
    return Result(Status.OK, sum(r.nbytes for r in results)) if bad is None else bad
