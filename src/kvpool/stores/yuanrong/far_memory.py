"""Bytes between this process and another one of this user, in one copy; a few threads share large ones.

The kernel allows it towards a child process unless kernel.yama.ptrace_scope is 2 or more, or a seccomp filter of the container
forbids it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvpool.devices.affinity import usable_cpus
from kvpool.devices.process_memory import Int64, joined, parts, readv, writev

Move = Callable[[int, Int64, Int64, Int64], tuple[int, int]]
CALL_BYTES = 1 << 30  # the kernel moves at most 2 GiB - 4 KiB a call
THREADS, SHARE = 4, 8 << 20  # the most that copy at one time, and bytes that are worth a thread


def write(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``near[i]`` here to ``far[i]`` there (1-D, same length). OSError where not all arrived."""
    _move(writev, pid, far, near, sizes)


def read(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``far[i]`` there to ``near[i]`` here (1-D, same length). OSError where not all arrived."""
    _move(readv, pid, far, near, sizes)


def _move(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """No byte moves any more when it returns or raises."""
    far, near, sizes = joined(far, near, sizes)
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
    threads = max(1, min(THREADS, len(usable_cpus()), len(sizes), total // SHARE))
    ends = np.searchsorted(np.cumsum(sizes), np.arange(1, threads) * total // threads) + 1
    bounds = [0, *ends.tolist(), len(sizes)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _share(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    for part in parts(sizes, CALL_BYTES):
        wanted = int(sizes[part].sum())
        moved, number = call(pid, near[part], far[part], sizes[part])
        if moved != wanted:
            reason = os.strerror(number) if moved < 0 else "memory ends early"
            raise OSError(number, f"copying {wanted} bytes to or from process {pid}: {reason}")
