"""A launch below a process that guards it: whichever of the two is killed, the other one ends everything."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from kvpool.ops.launch import descendants
from kvpool.ops.launch.abandoned import end_abandoned
from kvpool.ops.launch.signals import NUMBERS

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
GRACE_S, KILL_S = 3.0, 5.0


def guarded(run: Callable[[], int], say: Callable[[str], None]) -> int:
    """Call ``run`` in a child process; the exit status that it returns, or 128 + the signal that has killed the child.

    Signals to end are passed on to the child. If it is killed, what it has started is ended here, with its files; ``say`` tells so.
    If this process is killed, the child gets SIGTERM. For the main thread, before anything is started."""
    with descendants.adopting() as others:
        guard = os.getpid()
        _flush()  # or the child would print it again
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        child = os.fork()
        if child == 0:
            _below(run, guard)
        with _passed_on(child):
            _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        with suppress(OSError, ValueError):
            say(f"killed by signal {os.WTERMSIG(status)}; ending what it has started")
        _end(others, say)
        return 128 + os.WTERMSIG(status)


def _below(run: Callable[[], int], guard: int) -> NoReturn:
    """In a session of its own: what kills or stops the guard's process group does not reach it."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() == guard:  # else it was killed before the line above
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
            code = run()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - whatever it is, this process ends here and says why
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def _passed_on(child: int) -> Iterator[None]:
    """Signals to end, which are blocked, go to the child within the block, and nowhere after it: what remains has deadlines."""
    for number in NUMBERS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    try:
        yield
    finally:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def _end(others: set[descendants.Descendant], say: Callable[[str], None]) -> None:
    """In order where the launch has written down what it started, then whatever is left of it."""
    segments = descendants.shared_segments(descendants.descendants() - others)
    try:
        end_abandoned(say)
    finally:
        descendants.end_all(others, GRACE_S, KILL_S)
        descendants.remove(segments)
