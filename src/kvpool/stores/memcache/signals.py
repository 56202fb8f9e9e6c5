"""Signal handlers stay whose they are: the library installs its own, which end the process, when its client is made."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ROOM = 512  # bytes: more than a struct sigaction has anywhere
_NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


@contextmanager
def kept_handlers() -> Iterator[None]:
    """From any thread; Python's own functions for it work in the main thread only."""
    libc = ctypes.CDLL(None)
    before = {number: ctypes.create_string_buffer(_ROOM) for number in _NUMBERS}
    for number, action in before.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in before.items():
            libc.sigaction(number, action, None)
