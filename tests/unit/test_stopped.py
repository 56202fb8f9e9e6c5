"""The tests' own SIGSTOP: nothing stays stopped, whatever goes wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.stopped import stopped


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(process: subprocess.Popen[bytes], *wanted: str) -> bool:
    end = time.monotonic() + 5
    while state(process) not in wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def sleepers():
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    yield made
    for one in made:
        one.kill()
        one.wait()


def test_they_stand_still_within_the_block_only(sleepers) -> None:
    with stopped(one.pid for one in sleepers):
        assert all(becomes(one, "T") for one in sleepers)
    assert all(becomes(one, "S", "R") for one in sleepers)


def test_one_that_has_gone_leaves_no_other_stopped(sleepers) -> None:
    first, gone, last = sleepers
    gone.kill()
    gone.wait()
    with pytest.raises(ProcessLookupError), stopped([first.pid, gone.pid, last.pid]):
        pytest.fail("one of them could not be stopped")
    assert becomes(first, "S", "R")
    assert becomes(last, "S", "R")


def test_one_that_dies_within_the_block_is_no_failure(sleepers) -> None:
    first, dies, last = sleepers
    with stopped(one.pid for one in sleepers):
        dies.kill()
        dies.wait()
    assert becomes(first, "S", "R")
    assert becomes(last, "S", "R")
