"""Waiting in tests: for a condition, and for the end of a process; with deadlines that a loaded machine of two cores keeps too."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0


def eventually(condition: Callable[[], T], what: str = "it holds", seconds: float = PATIENCE_S) -> T:
    """Ask until the answer is a true one, and return it. AssertionError, naming ``what``, after ``seconds``."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return answer


@contextmanager
def ended_after(process: subprocess.Popen[Any], patience_s: float) -> Iterator[None]:
    """After the block the process is told to end, and killed where that takes too long. What it prints is read and dropped."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def is_stopped(pid: int) -> bool:
    """A signal that stops a process takes effect a little later than it is sent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
