"""MemCache's service on a host without an NPU, for tests and commands that take any ``Service``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpool.ops.services.base import LOOPBACK, Service, Started
from kvpool.ops.services.memcache import MemcacheService
from kvpool.ops.services.processes import load
from tests.ascend_stand_in.stage import Stage


class StagedMemcacheService(Service):
    """Runs in a Stage of its own. ``prefix`` comes before the command of every process that uses the store; ``outside`` before the
    service's, which it may bring to another network."""

    backend = "memcache"

    def __init__(self, folder: Path, dram_bytes: int, host: str = LOOPBACK, outside: Sequence[str] = ()) -> None:
        self.stage = Stage(folder)
        self._dram_bytes = dram_bytes
        self._host = host
        self._outside = outside
        self.prefix = self.stage.prefix

    def start(self, folder: Path, deadline_s: float) -> Started:
        try:
            self._run("start", folder, deadline_s)
        except AssertionError as error:
            self.stage.close()
            raise OSError(str(error)) from None
        started = load(folder)
        assert started is not None
        return started

    def stop(self, folder: Path, deadline_s: float) -> list[str]:
        said = self._run("stop", folder, deadline_s).split()
        self.stage.close()
        return said[said.index("stopped") + 1 :]

    def status(self, folder: Path) -> dict[str, str]:
        return MemcacheService().status(folder)

    def _run(self, what: str, folder: Path, deadline_s: float) -> str:
        module = "tests.ascend_stand_in.service"
        arguments = (what, str(folder), str(self._dram_bytes >> 20), self._host)
        return self.stage.python(module, *arguments, timeout_s=deadline_s, outside=self._outside)
