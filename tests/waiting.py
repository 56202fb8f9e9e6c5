"""Waiting in tests: for a condition, and for the end of a process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it holds", seconds: float = 30.0) -> T:
    """Ask until the answer is a true one, and return it. AssertionError, naming ``what``, after ``seconds``."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
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
