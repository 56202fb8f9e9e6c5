"""Many copies within this process's memory by one system call, aimed at ourselves.

A memmove per segment takes and gives the interpreter lock each time: beside a busy Python thread that costs more than the bytes do.
The kernel looks up the pages of the *remote* side, which is cheap for ordinary memory and not for shared memory: so the pool's side
is always the local one.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np

from kvpool.devices.process_memory import Int64, parts, readv, writev

MAX_BYTES = 1 << 30  # of one call; the kernel moves at most 2 GiB - 4 KiB


def copy(targets: Int64, sources: Int64, sizes: Int64, *, into_pool: bool) -> bool:
    """Copy ``sizes[i]`` bytes from ``sources[i]`` to ``targets[i]`` (1-D). False where the system does not let us, or stops in
    between: then nothing may be relied on, and the caller copies it all again in another way."""
    return allowed() and _copy(targets, sources, sizes, into_pool)


def _copy(targets: Int64, sources: Int64, sizes: Int64, into_pool: bool) -> bool:
    pid = os.getpid()
    for part in parts(sizes, MAX_BYTES):
        to, at, nbytes = targets[part], sources[part], sizes[part]
        moved, _ = readv(pid, to, at, nbytes) if into_pool else writev(pid, at, to, nbytes)
        if moved != int(nbytes.sum()):
            return False
    return True


@cache
def allowed() -> bool:
    """Whether it works here: some containers forbid the calls, some systems lack them."""
    source, size = np.arange(16, dtype=np.uint8), np.array([16], dtype=np.int64)
    at = np.array([source.ctypes.data], dtype=np.int64)
    try:
        for into_pool in (True, False):
            target = np.zeros_like(source)
            to = np.array([target.ctypes.data], dtype=np.int64)
            if not _copy(to, at, size, into_pool) or not np.array_equal(source, target):
                return False
    except AttributeError:
        return False
    return True
