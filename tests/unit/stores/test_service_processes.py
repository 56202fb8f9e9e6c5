"""What a service leaves behind when its start fails: nothing."""

import os
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvpool.ops.services import memcache
from kvpool.ops.services.processes import start_time

MAPPED = """
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_a_start_that_fails_leaves_no_shared_memory_of_killed_processes(monkeypatch, tmp_path):
    segment, mark = Path(f"/dev/shm/memfabric_hybrid_test-{os.getpid()}"), tmp_path / "pid"
    spawn = memcache.spawn

    def deaf(name, command, folder, env):
        started = spawn(name, [sys.executable, "-c", MAPPED, str(segment), str(mark)], folder, env)
        eventually(lambda: mark.exists() and mark.read_text(), "it has mapped its memory")
        assert segment.exists()
        return started

    monkeypatch.setattr(memcache, "spawn", deaf)
    monkeypatch.setattr(memcache, "meta_service_runs", lambda: False)
    try:
        with pytest.raises(OSError, match="did not answer within"):
            memcache.MemcacheService().start(tmp_path / "service", 0.5)
        assert not segment.exists()
        assert not start_time(int(mark.read_text()))
    finally:
        segment.unlink(missing_ok=True)
