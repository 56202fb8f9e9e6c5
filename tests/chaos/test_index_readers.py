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
from tests.waiting import eventually

BUSY = ("read", "read", "read", "write", "write")


@pytest.fixture
def folder(pool_root: Path) -> Path:
    mine = index_worker.Index(pool_root)
    mine.write()
    mine.close()
    return pool_root


@pytest.fixture
def start() -> Iterator:
    """``start(folder, role, …)``: they begin together, when all are ready."""
    started = []

    def one(role: str, folder: Path, guard: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.chaos.index_worker", role, str(folder), guard]
        root = Path(__file__).parents[2]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, cwd=root, **pipes, text=True))
        return started[-1]

    def run(folder: Path, *roles: str, guard: str = "on") -> list[subprocess.Popen[str]]:
        processes = [one(role, folder, guard) for role in roles]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("x")
            process.stdin.flush()
        return processes

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    """What it counted, TURNS turns at least; a crash counts as one wrong value."""
    output, _ = process.communicate(timeout=120)
    if process.returncode < 0:
        return {"turns": 0, "wrong": 1}
    assert process.returncode == 0, output
    return json.loads(output)


def test_readers_beside_writers_see_whole_snapshots(folder, start):
    processes = start(folder, *BUSY)
    time.sleep(6)
    counts = [finish(process) for process in processes]
    assert sum(count["wrong"] for count in counts) == 0, counts


def test_without_the_guard_they_do_not(folder, start):
    """The control: the test above can fail."""

    def seen() -> bool:
        processes = start(folder, *BUSY, guard="off")
        time.sleep(6)
        return sum(finish(process)["wrong"] for process in processes) > 0

    eventually(seen, "wrong values", 150)


def test_writers_killed_at_any_instant_leave_whole_snapshots(folder, start):
    readers = start(folder, "read", "read")
    kills, end = 0, time.monotonic() + 7
    while time.monotonic() < end or kills < 6:
        (victim,) = start(folder, "write")
        time.sleep(0.05 + kills % 7 * 0.01)
        victim.kill()
        kills += 1
    counts = [finish(process) for process in readers]
    assert sum(count["wrong"] for count in counts) == 0, counts


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
    (reader,) = start(folder, "read")
    held_up = turn = 0
    while turn < 20 or held_up < 6:
        turn += 1
        assert turn < 400, f"{held_up} of {turn} stops were inside a read"
        time.sleep(0.05 + turn % 20 * 0.0013)
        held_up += stop_in_a_read(mine, reader)
        assert mine.read(0) == 0, "others read on"
        os.kill(reader.pid, signal.SIGCONT)
        for _ in range(4):
            mine.write(60.0)
    assert finish(reader)["wrong"] == 0
    mine.close()


def test_a_reader_killed_while_it_is_stopped_holds_nobody_up(folder, start):
    mine = index_worker.Index(folder)

    def caught() -> "subprocess.Popen[str] | None":
        (reader,) = start(folder, "read")
        time.sleep(0.05)
        return reader if stop_in_a_read(mine, reader) else None

    reader = eventually(caught, "one is stopped inside a read", 150)
    reader.kill()
    reader.wait()
    for _ in range(4):
        mine.write(60.0)
    size = (folder / "index" / "data.mdb").stat().st_size
    for _ in range(200):
        mine.write(60.0)
    assert (folder / "index" / "data.mdb").stat().st_size == size, "pages are used again"
    mine.close()
