"""Bytes between this process and another one of this user, in one copy.

The kernel allows it towards a child process unless kernel.yama.ptrace_scope is 2 or more, or a seccomp filter of the container
forbids it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from kvpool.devices.copy_threads import share_runs
from kvpool.devices.process_memory import Int64, joined, parts, readv, writev

Move = Callable[[int, Int64, Int64, Int64], tuple[int, int]]
CALL_BYTES = 1 << 30  # the kernel moves at most 2 GiB - 4 KiB a call


def write(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``near[i]`` here to ``far[i]`` there (1-D, same length). OSError where not all arrived."""
    _move(writev, pid, far, near, sizes)


def read(pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """Copy ``sizes[i]`` bytes from ``far[i]`` there to ``near[i]`` here (1-D, same length). OSError where not all arrived."""
    _move(readv, pid, far, near, sizes)


def _move(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    """No byte moves any more when it returns or raises."""
    far, near, sizes = joined(far, near, sizes)
    share_runs(partial(_share, call, pid), far, near, sizes)


def _share(call: Move, pid: int, far: Int64, near: Int64, sizes: Int64) -> None:
    for part in parts(sizes, CALL_BYTES):
        wanted = int(sizes[part].sum())
        moved, number = call(pid, near[part], far[part], sizes[part])
        if moved != wanted:
            reason = os.strerror(number) if moved < 0 else "memory ends early"
            raise OSError(number, f"copying {wanted} bytes to or from process {pid}: {reason}")
