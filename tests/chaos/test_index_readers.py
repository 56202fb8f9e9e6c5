"""Reads of the index beside writers that use its pages again: every value is verified. Without the guard, wrong ones are seen."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.stores.local.write_lock import Abandoned
from tests.chaos import index_worker


@pytest.fixture
def folder(pool_root: Path) -> Path:
    mine = index_worker.Index(pool_root)
    mine.write()
    mine.close()
    return pool_root


@pytest.fixture
def start() -> Iterator:
    started = []

    def run(role: str, folder: Path, seconds: float, guard: str = "on") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.chaos.index_worker", role, str(folder), str(seconds), guard]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    """What it counted; a crash counts as one wrong value."""
    output, _ = process.communicate(timeout=60)
    if process.returncode < 0:
        return {"turns": 0, "wrong": 1}
    assert process.returncode == 0, output
    return json.loads(output)


def test_readers_beside_writers_see_whole_snapshots(folder, start):
    processes = [start(role, folder, 6) for role in ("read", "read", "read", "write", "write")]
    counts = [finish(process) for process in processes]
    assert sum(count["wrong"] for count in counts) == 0, counts
    assert all(count["turns"] > 100 for count in counts), counts


def test_without_the_guard_they_do_not(folder, start):
    """The control: the test above can fail."""
    processes = [start(role, folder, 6, "off") for role in ("read", "read", "read", "write", "write")]
    counts = [finish(process) for process in processes]
    assert sum(count["wrong"] for count in counts) > 0, counts


def test_writers_killed_at_any_instant_leave_whole_snapshots(folder, start):
    readers = [start("read", folder, 8) for _ in range(2)]
    kills, end = 0, time.monotonic() + 7
    while time.monotonic() < end:
        victim = start("write", folder, 60)
        time.sleep(0.05 + kills % 7 * 0.01)
        victim.kill()
        kills += 1
    counts = [finish(process) for process in readers]
    assert sum(count["wrong"] for count in counts) == 0, counts
    assert all(count["turns"] > 100 for count in counts), counts
    assert kills > 5


def stop_in_a_read(mine: index_worker.Index, reader: "subprocess.Popen[str]") -> bool:
    """Stop it; was it inside a read? Then it forbids the third transaction from now on, if not an earlier one."""
    os.kill(reader.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
    try:
        for _ in range(3):
            mine.write(0.05)
    except Abandoned:
        return True
    return False


def test_a_reader_stopped_at_any_instant_holds_writers_up_until_it_goes_on(folder, start):
    mine = index_worker.Index(folder)
    reader = start("read", folder, 5)
    held_up = 0
    for turn in range(20):
        time.sleep(0.05 + turn * 0.0013)
        held_up += stop_in_a_read(mine, reader)
        assert mine.read(0) == 0, "others read on"
        os.kill(reader.pid, signal.SIGCONT)
        for _ in range(4):
            mine.write(5.0)
    assert held_up > 5
    assert finish(reader)["wrong"] == 0
    mine.close()


def test_a_reader_killed_while_it_is_stopped_holds_nobody_up(folder, start):
    mine = index_worker.Index(folder)
    while not stop_in_a_read(mine, reader := start("read", folder, 60)):
        pass
    reader.kill()
    reader.wait()
    for _ in range(4):
        mine.write(1.0)
    size = (folder / "index" / "data.mdb").stat().st_size
    for _ in range(200):
        mine.write(1.0)
    assert (folder / "index" / "data.mdb").stat().st_size == size, "pages are used again"
    mine.close()
