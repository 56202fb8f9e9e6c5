"""The real service of each store on this host, for tests, benchmarks and `make conformance`; MemCache under the stand-in for the
Ascend driver where there is no such driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.ops.services import Service, Started, service
from kvpool.ops.services.yuanrong import YuanrongService
from tests.ascend_stand_in.refuse import has_driver
from tests.ascend_stand_in.staged import StagedMemcacheService


@dataclass(frozen=True)
class LiveService:
    """``prefix`` comes before the command of every process that uses the store."""

    started: Started
    prefix: list[str] = field(default_factory=list)


@contextmanager
def live_service(backend: str, folder: Path, dram_bytes: int, start_s: float, stop_s: float) -> Iterator[LiveService]:
    """Started in ``folder``, stopped at the end of the block. OSError, ValueError or ImportError, in one line, where it cannot run
    here."""
    made, prefix = _service(backend, folder, dram_bytes)
    started = made.start(folder, start_s)
    try:
        yield LiveService(started, prefix)
    finally:
        made.stop(folder, stop_s)


def _service(backend: str, folder: Path, dram_bytes: int) -> tuple[Service, list[str]]:
    if backend == "yuanrong":
        return YuanrongService(memory_mb=dram_bytes >> 20, request_timeout_ms=5000), []  # others may keep the machine busy
    if backend != "memcache" or has_driver():
        return service(backend, dram_bytes=dram_bytes), []
    folder.mkdir(parents=True, exist_ok=True)
    staged = StagedMemcacheService(folder, dram_bytes)
    return staged, staged.prefix
