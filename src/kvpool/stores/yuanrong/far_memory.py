"""Bytes between this process and another one of this user, in one copy: process_vm_readv and process_vm_writev.

One system call moves up to 1024 runs, without the interpreter lock; a few threads share large copies. The kernel allows it towards
a child process unless kernel.yama.ptrace_scope is 2 or more, or a seccomp filter of the container forbids it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Move = Callable[[int, int, int, int, int, int], int]
RUNS = 1024  # IOV_MAX of Linux
THREADS, SHARE = 4, 8 << 20  # the most that copy at one time, and bytes that are worth a thread


@cache
def _call(name: str) -> Move:
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call  # type: ignore[no-any-return]


def write(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``near[i]`` here to ``far[i]`` there (1-D, same length). OSError where not all arrived."""
    _move(_call("process_vm_writev"), pid, far, near, sizes)


def read(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``far[i]`` there to ``near[i]`` here (1-D, same length). OSError where not all arrived."""
    _move(_call("process_vm_readv"), pid, far, near, sizes)


def _move(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """No byte moves any more when it returns or raises."""
    far, near, sizes = _joined(far, near, sizes)
    errors: list[OSError] = []

    def work(part: slice) -> None:
        try:
            _share(call, pid, far[part], near[part], sizes[part])
        except OSError as error:
            errors.append(error)

    first, *others = _shares(sizes)
    threads = [threading.Thread(target=work, args=(part,), name="kvpool-yuanrong-copy", daemon=True) for part in others]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        work(first)
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]


def _shares(sizes: Int64) -> list[slice]:
    """Which runs each thread copies: about as many bytes each, one thread alone where they are few."""
    total = int(sizes.sum())
    threads = max(1, min(THREADS, len(os.sched_getaffinity(0)), len(sizes), total // SHARE))
    ends = np.searchsorted(np.cumsum(sizes), np.arange(1, threads) * total // threads) + 1
    bounds = [0, *ends.tolist(), len(sizes)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _share(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    for first in range(0, len(sizes), RUNS):
        part = slice(first, first + RUNS)
        here, there = _runs(near[part], sizes[part]), _runs(far[part], sizes[part])
        moved = call(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved != int(sizes[part].sum()):
            number = ctypes.get_errno()
            reason = os.strerror(number) if moved < 0 else "memory ends early"
            raise OSError(number, f"copying {int(sizes[part].sum())} bytes to or from process {pid}: {reason}")


def _joined(far: Int64, near: Int64, sizes: Int64) -> tuple[Int64, Int64, Int64]:
    """Runs that continue each other on both sides become one; empty ones are dropped."""
    kept = sizes > 0
    if not kept.all():
        far, near, sizes = far[kept], near[kept], sizes[kept]
    if len(sizes) < 2:
        return far, near, sizes
    follows = (far[1:] == far[:-1] + sizes[:-1]) & (near[1:] == near[:-1] + sizes[:-1])
    if not follows.any():
        return far, near, sizes
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return far[first], near[first], np.add.reduceat(sizes, first)


def _runs(addresses: Int64, sizes: Int64) -> Int64:
    """An array of struct iovec."""
    return np.ascontiguousarray(np.stack([addresses, sizes], axis=1))
