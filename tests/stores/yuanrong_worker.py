"""A real datasystem worker for tests, and stores on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.ops.services import processes
from kvpool.ops.services.base import Running, Started
from kvpool.ops.services.yuanrong import YuanrongService, answers
from kvpool.options.yuanrong_json import YuanrongOptions, read_yuanrong
from kvpool.stores.context import Role, StoreContext
from kvpool.stores.yuanrong import YuanrongStore

START_S = 120.0
STOP_S = 60.0


class Worker:
    """A service that runs; ``kill`` and ``restart`` act on its worker process alone."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.address = started.addresses["worker"]
        self.again: subprocess.Popen[bytes] | None = None
        proc = Path(f"/proc/{self.process.pid}")
        self._command = [word.decode() for word in (proc / "cmdline").read_bytes().split(b"\0") if word]
        pairs = (pair.decode().partition("=") for pair in (proc / "environ").read_bytes().split(b"\0") if pair)
        self._env = {name: value for name, _, value in pairs}

    @property
    def process(self) -> Running:
        return next(process for process in self.started.processes if process.name == "worker")

    @property
    def pid(self) -> int:
        return self.again.pid if self.again is not None else self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.again is not None:
            self.again.wait(60)
        end = time.monotonic() + 60
        while processes.alive(self.process) and time.monotonic() < end:
            time.sleep(0.02)

    def restart(self) -> None:
        """The worker once more, on the same address, as the cluster's supervisor would."""
        self.again = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        answers(self.address, START_S)

    def options(self, **changes: object) -> YuanrongOptions:
        path = self.started.env["YR_CONFIG_PATH"]
        content = json.loads(Path(path).read_text()) | changes
        return read_yuanrong(json.dumps(content), path, {}).options

    def store(self, role: Role = "worker", **changes: object) -> YuanrongStore:
        return YuanrongStore(self.options(**changes), StoreContext(role))


@contextmanager
def patience() -> Iterator[None]:
    """On a busy machine a client process takes long to start, and a lookup to be answered. Not where their deadlines are tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool.stores.yuanrong.store._START_S", START_S)
        patch.setattr(YuanrongStore, "limits", replace(YuanrongStore.limits, lookup_s=30.0))
        yield


@contextmanager
def running_worker(folder: Path, memory_mb: int, **options: object) -> Iterator[Worker]:
    """Started, and stopped whatever happens."""
    service = YuanrongService(memory_mb=memory_mb, **options)  # type: ignore[arg-type]
    worker = Worker(service.start(folder, START_S))
    before = {name: os.environ.get(name) for name in worker.started.env}
    os.environ.update(worker.started.env)
    try:
        yield worker
    finally:
        if worker.again is not None:
            worker.again.kill()
            worker.again.wait(10)
        service.stop(folder, STOP_S)
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
