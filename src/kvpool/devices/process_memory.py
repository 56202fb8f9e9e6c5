"""Copies between the memories of two processes, or within one, by one system call: process_vm_readv and process_vm_writev.

A call moves up to ``MAX_RUNS`` byte runs without the interpreter lock. Runs are 1-D arrays of addresses and sizes, in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

MAX_RUNS = 1024  # UIO_MAXIOV


def readv(pid: int, ours: Int64, theirs: Int64, sizes: Int64) -> tuple[int, int]:
    """Copy ``sizes[i]`` bytes from ``theirs[i]`` in process ``pid`` to ``ours[i]``: bytes moved, and errno where that is -1. The
    count is short where the rest is not mapped."""
    return _move("process_vm_readv", pid, ours, theirs, sizes)


def writev(pid: int, ours: Int64, theirs: Int64, sizes: Int64) -> tuple[int, int]:
    """The other way."""
    return _move("process_vm_writev", pid, ours, theirs, sizes)


def _move(name: str, pid: int, ours: Int64, theirs: Int64, sizes: Int64) -> tuple[int, int]:
    here, there = (np.ascontiguousarray(np.stack([addresses, sizes], axis=1)) for addresses in (ours, theirs))  # struct iovec[]
    moved = int(_function(name)(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0))
    return moved, ctypes.get_errno() if moved < 0 else 0


@cache
def _function(name: str) -> Any:  # noqa: ANN401 - a C function
    """AttributeError where the system has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    size = ctypes.c_ulong
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]
    function.restype = ctypes.c_ssize_t
    return function


def parts(sizes: Int64, nbytes: int) -> Iterator[slice]:
    """Cut runs by number and bytes, so that each part is one call; a single run larger than ``nbytes`` is a part of its own."""
    start, ends = 0, np.cumsum(sizes)
    while start < len(ends):
        base = int(ends[start] - sizes[start])
        stop = int(np.searchsorted(ends, base + nbytes, side="right"))
        stop = min(max(stop, start + 1), start + MAX_RUNS)
        yield slice(start, stop)
        start = stop


def joined(ones: Int64, others: Int64, sizes: Int64) -> tuple[Int64, Int64, Int64]:
    """Runs that continue each other on both sides become one; empty ones are dropped."""
    kept = sizes > 0
    if not kept.all():
        ones, others, sizes = ones[kept], others[kept], sizes[kept]
    if len(sizes) < 2:
        return ones, others, sizes
    follows = (ones[1:] == ones[:-1] + sizes[:-1]) & (others[1:] == others[:-1] + sizes[:-1])
    if not follows.any():
        return ones, others, sizes
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return ones[first], others[first], np.add.reduceat(sizes, first)


def cut(ones: Int64, others: Int64, sizes: Int64, nbytes: int) -> tuple[Int64, Int64, Int64]:
    """Runs of more than ``nbytes`` become several that continue each other."""
    counts = np.maximum(-(-sizes // nbytes), 1)
    if not len(sizes) or counts.max() == 1:
        return ones, others, sizes
    rows = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * nbytes
    return ones[rows] + starts, others[rows] + starts, np.minimum(sizes[rows] - starts, nbytes)
