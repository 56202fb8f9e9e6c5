"""Processes that stand still for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """SIGSTOP; after the block all of them that live go on, also where one of them could not be stopped."""
    with ExitStack() as undo:
        for pid in pids:
            undo.callback(_go_on, pid)
            os.kill(pid, signal.SIGSTOP)
        yield


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
