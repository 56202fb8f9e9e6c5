"""Runs of free memory: how many pages of 2 MiB and 1 GiB could be had without moving anything.

/proc/buddyinfo counts free blocks by size, mostly up to 4 MiB. Larger runs show only in /proc/kpageflags, which root can read:
one 64-bit word for each page, in which one bit says that the page is free."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.ops.doctor.host import Host
from kvpool.ops.doctor.need import page_nbytes
from kvpool.options.amounts import GIB, HUGE_PAGE

FREE = np.uint64(1 << 10)  # KPF_BUDDY
SCAN_S = 5.0
_WORDS = 1 << 21


@dataclass(frozen=True, slots=True)
class FreeRuns:
    """Aligned runs that are free now: ``small`` of 2 MiB, ``large`` of 1 GiB; ``longest`` run of any kind in bytes.

    None where the kernel does not show them to this user. ``partial``: there was no time for all memory, so there may be more."""

    small: int | None = None
    large: int | None = None
    longest: int | None = None
    partial: bool = False


def read_free_runs(host: Host, page: int | None = None, deadline_s: float = SCAN_S) -> FreeRuns:
    """``page`` is the size of an ordinary page in bytes."""
    page = page or page_nbytes()
    scanned = _scan(host, page, deadline_s)
    return scanned if scanned is not None else _from_buddyinfo(host.text("/proc/buddyinfo"), page)


def _from_buddyinfo(text: str | None, page: int) -> FreeRuns:
    """Column k counts free blocks of 2^k pages. A size beyond the last column cannot be told."""
    counts: list[int] = []
    for line in (text or "").splitlines():
        words = line.partition("zone")[2].split()[1:]
        if words and all(word.isdigit() for word in words):
            counts = [a + b for a, b in zip(map(int, words), counts or [0] * len(words))]
    if not counts:
        return FreeRuns()
    longest = max((page << order for order, count in enumerate(counts) if count), default=0)
    return FreeRuns(_blocks(counts, page, HUGE_PAGE), _blocks(counts, page, GIB), longest)


def _blocks(counts: list[int], page: int, nbytes: int) -> int | None:
    first = (nbytes // page).bit_length() - 1
    if first >= len(counts):
        return None
    return sum(count << (order - first) for order, count in enumerate(counts) if order >= first)


def _scan(host: Host, page: int, deadline_s: float) -> FreeRuns | None:
    """Count free runs page by page, as many as there is time for; None where that finds none, or the file cannot be read."""
    end = time.monotonic() + deadline_s
    small = large = longest = run = 0
    per_large, per_small = GIB // page, HUGE_PAGE // page
    rest = np.zeros(0, dtype=bool)
    late = False
    with suppress(OSError), host.place("/proc/kpageflags").open("rb", buffering=0) as file:
        while chunk := file.read(_WORDS * 8):
            if late := time.monotonic() > end:
                break
            free = (np.frombuffer(chunk[: len(chunk) // 8 * 8], dtype=np.uint64) & FREE) != 0
            longest, run = _longest(free, longest, run)
            rest = np.concatenate([rest, free])
            whole = len(rest) // per_large * per_large
            small += _whole(rest[:whole], per_small)
            large += _whole(rest[:whole], per_large)
            rest = rest[whole:]
        return FreeRuns(small + _whole(rest, per_small), large, longest * page, late) if longest else None
    return None


def _whole(free: NDArray[np.bool_], pages: int) -> int:
    """How many aligned groups of ``pages`` are free altogether."""
    count = len(free) // pages
    return int(free[: count * pages].reshape(count, pages).all(axis=1).sum()) if count else 0


def _longest(free: NDArray[np.bool_], longest: int, run: int) -> tuple[int, int]:
    """The longest run of pages so far, and the one that reaches the end; ``run`` reached the beginning."""
    used = np.flatnonzero(~free)
    if not len(used):
        return max(longest, run + len(free)), run + len(free)
    gaps = np.diff(used) - 1
    inner = int(gaps.max()) if len(gaps) else 0
    return max(longest, run + int(used[0]), inner), len(free) - 1 - int(used[-1])
