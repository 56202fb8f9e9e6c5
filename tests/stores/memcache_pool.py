"""MemCache for tests: its real service in a Stage, and processes that use it."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpool.ops.services.base import Started
from kvpool.ops.services.processes import load
from tests.ascend_stand_in.staged import StagedMemcacheService
from tests.stores.needs import needs_memcache

START_S = 90.0


class Client:
    """A worker process (memcache_worker.py) and its answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self.took_s = 0.0
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._next(START_S).startswith("ready")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("> "):
                self._lines.put(line[2:].strip())
        self._lines.put(None)

    def _next(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no answer within {timeout_s:g} s; it said: {''.join(self.said)[-2000:]}") from None
        assert line is not None, f"the worker ended; it said: {''.join(self.said)[-2000:]}"
        return line

    def ask(self, do: str, *, timeout_s: float = 90.0, **arguments: Any) -> Any:
        """What the worker answers; ``took_s`` is how long it took."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        reply, _ = json.JSONDecoder().raw_decode(self._next(timeout_s))  # the library may print behind it
        self.took_s = reply["took_s"]
        return reply["answer"]

    def end(self, timeout_s: float) -> int:
        """Have it leave as any program does; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "end"}) + "\n")
        self.process.stdin.flush()
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(60)


class MemcachePool:
    """One MetaService and, with ``dram_mb``, a LocalService that gives memory; ``close`` ends all that was started."""

    def __init__(self, folder: Path, dram_mb: int) -> None:
        self.folder = folder
        self.clients: list[Client] = []
        self._service = StagedMemcacheService(folder, dram_mb << 20)
        self.stage = self._service.stage
        self._service.start(folder, START_S)

    def stop(self) -> list[str]:
        """The names of what had to be killed."""
        return self._service.stop(self.folder, START_S)

    def started(self) -> Started:
        started = load(self.folder)
        assert started is not None
        return started

    def pid(self, name: str) -> int:
        return next(process.pid for process in self.started().processes if process.name == name)

    def restart_meta_service(self) -> subprocess.Popen[str]:
        """On the same addresses, with the same file, as an operator would."""
        command = [sys.executable, "-c", "from memcache_hybrid import MetaService; MetaService.main()"]
        return self.stage.start(command, extra_env=self.started().env, log="meta-again.log")

    def client(self, **opening: Any) -> Client:
        """A worker whose store is open."""
        client = self.worker()
        answer = client.ask("open", timeout_s=90.0, **opening)
        assert answer == "open", answer
        return client

    def worker(self) -> Client:
        """A worker whose store is not open yet."""
        client = Client(self.stage.start([sys.executable, "-m", "tests.stores.memcache_worker", str(self.folder)]))
        self.clients.append(client)
        return client

    def close(self) -> None:
        self.stage.close()


@contextmanager
def one_memcache_at_a_time() -> Iterator[None]:
    """Waits for tests in other processes, since there can be one MetaService on a host; skips where the machine lacks something."""
    with Path(tempfile.gettempdir(), "kvpool-memcache-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        needs_memcache()
        yield


@contextmanager
def memcache_pool(folder: Path, dram_mb: int = 64) -> Iterator[MemcachePool]:
    """As ``one_memcache_at_a_time``."""
    with one_memcache_at_a_time():
        pool = MemcachePool(folder, dram_mb)
        try:
            yield pool
        finally:
            pool.close()
