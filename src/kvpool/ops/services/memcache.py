"""MemCache on this host: its MetaService and, where a size is given, a process that gives memory (the separated deployment)."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import kvpool
from kvpool.ops.services.base import LOOPBACK, Running, Service, Started
from kvpool.ops.services.memcache_files import Addresses, write_files
from kvpool.ops.services.ports import free_ports
from kvpool.ops.services.processes import STATE, alive, listens, load, refuse_running, save, spawn, stop_all, wait_until

META_SERVICE_LOCK = Path("/tmp/mmc_meta_service.lock")  # the library's: one MetaService per host
META, OWNER = "meta-service", "local-service"
READY = "local-service.ready"
_RUN_META = "from memcache_hybrid import MetaService; MetaService.main()"


class MemcacheService(Service):
    """``dram_bytes`` is what a process of its own gives to the pool; engines then give nothing. With 0 there is no such process:
    every engine gives ``engine_dram_bytes``. ``protocol`` is the library's; ``host_shm`` stays on this host and needs no NPU."""

    backend = "memcache"

    def __init__(
        self, dram_bytes: int = 0, *, engine_dram_bytes: int = 1 << 30, protocol: str = "host_shm", host: str = LOOPBACK
    ) -> None:
        self._dram = dram_bytes
        self._engine_dram = 0 if dram_bytes else engine_dram_bytes
        self._protocol = protocol
        self._host = host

    def start(self, folder: Path, deadline_s: float) -> Started:
        refuse_running(folder)
        if meta_service_runs():
            raise OSError(
                f"a MetaService runs on this host ({META_SERVICE_LOCK} is locked) and there can be only one: use it or stop it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        where = Addresses(*(f"{self._host}:{port}" for port in free_ports(3, self._host)))
        env = write_files(folder, where, self._protocol, self._dram, self._engine_dram)
        processes: list[Running] = []
        try:
            processes.append(spawn(META, [sys.executable, "-c", _RUN_META], folder, {**os.environ, **env}))
            wait_until(lambda: _listens(where.meta) and _listens(where.config_store), processes, deadline_s)
            if self._dram:
                processes.append(self._spawn_owner(folder))
                wait_until((folder / READY).exists, processes, deadline_s)
        except BaseException:
            end(processes, 2.0)
            raise
        started = Started(self.backend, str(folder), processes, env, where._asdict(), self._notes())
        save(started)
        return started

    def _spawn_owner(self, folder: Path) -> Running:
        code = str(Path(kvpool.__file__).parents[1])
        path = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH", ""))))
        command = [
            sys.executable,
            "-m",
            "kvpool.ops.services.memcache_owner",
            str(folder / "mmc-local-standalone.conf"),
            str(folder / READY),
        ]
        return spawn(OWNER, command, folder, {**os.environ, "PYTHONPATH": path})

    def _notes(self) -> list[str]:
        if self._dram:
            return ["engines give no memory: the pool outlives them, and a restarted engine finds what it stored"]
        return [f"each engine gives {self._engine_dram >> 20} MB, and what lies there goes with it (with a size given, it stays)"]

    def stop(self, folder: Path, deadline_s: float) -> list[str]:
        started = load(folder, self.backend)
        if started is None:
            return []
        killed = end(started.processes, deadline_s)
        (folder / READY).unlink(missing_ok=True)
        (folder / STATE).unlink(missing_ok=True)
        return killed

    def status(self, folder: Path) -> dict[str, str]:
        started = load(folder, self.backend)
        if started is None:
            return {}
        states = {}
        for process in started.processes:
            ready = _listens(started.addresses["meta"]) if process.name == META else (folder / READY).exists()
            states[process.name] = "dead" if not alive(process) else "ready" if ready else "starting"
        return states


def end(processes: Sequence[Running], deadline_s: float) -> list[str]:
    """As ``stop_all``; what killed processes leave in shared memory is removed."""
    left = [path for process in processes for path in _shared_memory(process)]
    killed = stop_all(processes, deadline_s)
    for path in left:
        path.unlink(missing_ok=True)
    return killed


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return listens(host, int(port))


def meta_service_runs() -> bool:
    """Whether a process holds the lock that every MetaService of a host takes."""
    try:
        file = META_SERVICE_LOCK.open("r+b")
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's: it stays after its end, so it tells nothing
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(file, fcntl.LOCK_UN)
    return False


def _shared_memory(process: Running) -> list[Path]:
    """The files of shared memory that only this process can be the maker of: those of the library that it has mapped."""
    found: set[Path] = set()
    with suppress(OSError):
        if alive(process):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith("/dev/shm/memfabric_hybrid_"):
                    found.add(Path(name.removesuffix(" (deleted)")))
    return sorted(found)
