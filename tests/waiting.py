"""Waiting in tests: until something holds, with a deadline that a loaded machine of two cores keeps too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0


def eventually(condition: Callable[[], T], what: str, seconds: float = PATIENCE_S) -> T:
    """Ask until the answer is true, and return it. ``what``: what was waited for, told where it does not come."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return answer


def stopped(pid: int) -> bool:
    """A signal that stops a process takes effect a little later than it is sent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
