"""The memory fence between readers and the evictor.

A reader writes a stamp ("I read slot s") and then loads the index entry again; the evictor removes the index entry and then loads
the stamps. On every processor that reorders a store with a later load (x86 too) both could miss each other, and the slot would be
reused under the reader. With a full fence between the two steps on both sides, at least one of them sees the other (Dekker's
argument).

The fence is membarrier(2), MEMBARRIER_CMD_GLOBAL_EXPEDITED: when it returns, every running thread of every process that
registered has passed a full barrier, and so has the caller; no assumption is made about the processor or about what numpy and
LMDB compile to. Where the kernel lacks it, a locked instruction (taking a lock) is a full fence on x86-64; elsewhere the pool
refuses to open.

One side may do without where the other one calls membarrier: it acts for both. ``reader_fence`` is for such a cheap side. On x86-64
it is the locked instruction all the same, for the other side may be a process whose kernel filter forbids membarrier."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable

_NUMBERS = {"x86_64": 324, "aarch64": 283}
_QUERY = 0
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2

Fence = Callable[[], None]


def _membarrier(number: int) -> Callable[[int], int]:
    libc = ctypes.CDLL(None, use_errno=True)
    syscall = libc.syscall
    syscall.restype = ctypes.c_long

    def call(command: int) -> int:
        return int(syscall(ctypes.c_long(number), ctypes.c_long(command), ctypes.c_long(0), ctypes.c_long(0)))

    return call


def _locked_instruction() -> Fence:
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence


def make_fence(machine: str | None = None) -> Fence:
    """The fence of this machine; registers the process for the barriers of others. OSError where there is none."""
    machine = machine or platform.machine()
    number = _NUMBERS.get(machine)
    if number is not None and machine == platform.machine():
        call = _membarrier(number)
        supported = call(_QUERY)
        wanted = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
        if supported > 0 and supported & wanted == wanted and call(_REGISTER_GLOBAL_EXPEDITED) == 0:

            def fence() -> None:
                if call(_GLOBAL_EXPEDITED) != 0:
                    code = ctypes.get_errno()
                    raise OSError(code, f"membarrier failed: {os.strerror(code)}")

            return fence
    if machine == "x86_64":
        return _locked_instruction()
    raise OSError(errno.ENOSYS, f"the local store needs membarrier(2), which this kernel lacks on {machine}")


def reader_fence(machine: str | None = None) -> Fence:
    """The cheap side of a pair whose other side calls ``make_fence()``'s. It orders a store with the loads after it."""
    return _locked_instruction() if (machine or platform.machine()) == "x86_64" else _nothing


def _nothing() -> None:
    """Every process of the pool has membarrier, or ``make_fence`` had refused."""
