"""Live stores for tests: the real service of each store on this host, and how an engine or a test reaches it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.ops.services import Started, processes, service
from tests.ascend_stand_in.staged import StagedMemcacheService
from tests.engine.runner import EngineSpec
from tests.hosts import Host
from tests.live_services import live_service
from tests.stores.needs import needs_memcache, needs_mooncake, needs_yuanrong

STORES = ("mooncake", "memcache", "yuanrong")
DRAM = 256 << 20
START_S, STOP_S = 90.0, 30.0
NEEDS = {"mooncake": needs_mooncake, "memcache": needs_memcache, "yuanrong": needs_yuanrong}


@dataclass(frozen=True)
class LiveStore:
    """``prefix`` comes before the command of every process that uses the store."""

    backend: str
    started: Started
    prefix: list[str] = field(default_factory=list)

    def spec(self, spec: EngineSpec) -> EngineSpec:
        """The same engine with this store instead of ``local``."""
        config = dict(spec.args["kv_transfer_config"])
        extra = {k: v for k, v in config["kv_connector_extra_config"].items() if not k.startswith("local_")}
        config["kv_connector_extra_config"] = {**extra, "backend": self.backend}
        args = {**spec.args, "kv_transfer_config": config}
        return dataclasses.replace(spec, args=args, env={**spec.env, **self.started.env}, prefix=self.prefix)


@contextmanager
def live_store(backend: str, folder: Path) -> Iterator[LiveStore]:
    """A service of its own in ``folder``, stopped afterwards. Skips, or in CI fails, where the machine lacks what it needs."""
    NEEDS[backend]()
    with live_service(backend, folder, DRAM, START_S, STOP_S) as live:
        yield LiveStore(backend, live.started, live.prefix)


@contextmanager
def far_store(backend: str, folder: Path, host: Host) -> Iterator[LiveStore]:
    """The same on another host, as an operator starts it there."""
    NEEDS[backend]()
    if backend == "memcache":
        folder.mkdir()
        staged = StagedMemcacheService(folder, DRAM, host.address, host.prefix)
        started = staged.start(folder, START_S)
        try:
            yield LiveStore(backend, started, staged.prefix)
        finally:
            staged.stop(folder, STOP_S)
        return
    arguments = ["store", "start", backend, "--host", host.address, "--folder", str(folder), "--dram", f"{DRAM >> 20}MB"]
    command = [*host.prefix, sys.executable, "-c", "from kvpool.cli import app; app()", *arguments]
    subprocess.run(command, check=True, timeout=START_S)
    running = processes.load(folder)
    assert running is not None
    try:
        yield LiveStore(backend, running)
    finally:
        service(backend).stop(folder, STOP_S)
