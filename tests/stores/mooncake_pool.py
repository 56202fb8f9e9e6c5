"""A Mooncake pool on this host for tests: the real master and owner, and what can happen to them."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvpool.ops.services import processes
from kvpool.ops.services.mooncake import MasterOptions, MooncakeService
from kvpool.options.deployment import UNKNOWN
from kvpool.options.mooncake_json import MooncakeOptions, read_mooncake
from kvpool.stores.base import Batch, Result, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore
from tests.waiting import eventually, is_stopped

MIB = 1 << 20
QUICK = MasterOptions(lease_s=1.0, client_ttl_s=3, discard_s=3)
DEADLINE = 30.0


class MooncakePool:
    """One service and the stores that a test opened on it."""

    def __init__(self, folder: Path, service: MooncakeService) -> None:
        self.folder = folder
        self.service = service
        self.started = service.start(folder, 90)
        self._stores: list[MooncakeStore] = []

    def options(self, **changes: object) -> MooncakeOptions:
        path = self.started.env["MOONCAKE_CONFIG_PATH"]
        return read_mooncake(Path(path).read_text(), path, {}, UNKNOWN).options.model_copy(update=changes)

    def store(self, context: StoreContext | None = None, load_deadline_s: float | None = None, **changes: object) -> MooncakeStore:
        return MooncakeStore(self.options(**changes), context or StoreContext(role="tool"), load_deadline_s=load_deadline_s)

    def open(self, context: StoreContext | None = None, load_deadline_s: float | None = None, **changes: object) -> MooncakeStore:
        store = self.store(context, load_deadline_s, **changes)
        store.open()
        self._stores.append(store)
        return store

    def process(self, name: str) -> processes.Running:
        return next(process for process in self.started.processes if process.name == name)

    def signal(self, name: str, number: int) -> None:
        os.killpg(self.process(name).pid, number)
        if number == signal.SIGKILL:
            eventually(lambda: not processes.alive(self.process(name)), "it is dead")
        if number == signal.SIGSTOP:
            eventually(lambda: is_stopped(self.process(name).pid), "it stands still")

    def restart(self, name: str) -> None:
        """Start a process again that was killed, at the same address."""
        port, metrics = (int(text.rpartition(":")[2]) for text in self.started.addresses.values())
        ready = self.folder / "owner.ready"
        ready.unlink(missing_ok=True)
        command = (
            self.service.master_command(self.folder, port, metrics) if name == "master" else self.service.owner_command(self.folder)
        )
        fresh = processes.spawn(name, command, self.folder, self.service._environment())
        kept = [process for process in self.started.processes if process.name != name]
        self.started = replace(self.started, processes=sorted([*kept, fresh], key=lambda process: process.name != "master"))
        processes.save(self.started)
        if name == "master":
            processes.wait_until(lambda: processes.listens(self.service.host, port), [fresh], 90)
        else:
            processes.wait_until(ready.exists, [fresh], 90)

    def close(self) -> None:
        for process in self.started.processes:
            if processes.alive(process):
                os.killpg(process.pid, signal.SIGCONT)
        self.service.stop(self.folder, 0.3)  # first: with the master gone the library closes at once
        for store in self._stores:
            store.close()


@contextmanager
def mooncake_pool(
    folder: Path,
    *,
    dram: int = 64 * MIB,
    master: MasterOptions = QUICK,
    tenants: Mapping[str, str] | None = None,
    ssd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[MooncakePool]:
    pool = MooncakePool(folder, MooncakeService(dram_bytes=dram, tenants=tenants or {}, ssd=ssd, master=master, env=env or {}))
    try:
        yield pool
    finally:
        pool.close()


def key(name: object) -> bytes:
    return f"v1:0123456789abcdef:g0:h0-7_l0-3_c0_0:{name}".encode()


def content(name: object, nbytes: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(str(name).encode())).integers(0, 256, nbytes, dtype=np.uint8)


def batch_of(names: list[object], memory: np.ndarray) -> Batch:
    addresses = memory.ctypes.data + np.arange(len(names), dtype=np.int64)[:, None] * memory.strides[0]
    return Batch([key(name) for name in names], addresses, np.array([memory.shape[1]], dtype=np.int64))


def put(store: MooncakeStore, names: list[object], nbytes: int = MIB, deadline_s: float = DEADLINE) -> list[Result]:
    """Put contents that follow from the names; waits as long as the call takes."""
    memory = np.stack([content(name, nbytes) for name in names])
    handle = store.put(batch_of(names, memory), deadline_s)
    assert handle.wait(120), "a put never ended"
    return handle.results()


def get(store: MooncakeStore, names: list[object], nbytes: int = MIB, deadline_s: float = DEADLINE) -> list[Result]:
    """Get, and compare every byte of what is said to be there."""
    memory = np.zeros((len(names), nbytes), dtype=np.uint8)
    handle = store.get(batch_of(names, memory), deadline_s)
    assert handle.wait(120), "a get never ended"
    for row, result in enumerate(handle.results()):
        assert result.status is not Status.OK or np.array_equal(memory[row], content(names[row], nbytes)), names[row]
    return handle.results()


def statuses(results: list[Result]) -> list[Status]:
    return [result.status for result in results]
