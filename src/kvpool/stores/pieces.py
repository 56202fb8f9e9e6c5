"""What writers and readers of pieces share: where a piece lies, and which bytes of an object have been written."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.stores.base import Addresses


def check_piece(rows: Sequence[int], count: int, offset: int, addresses: Addresses, sizes: Addresses) -> int:
    """The end of the piece inside its objects. ValueError for wrong shapes and rows."""
    if addresses.shape != (len(rows), len(sizes)):
        raise ValueError(f"addresses have shape {addresses.shape}, expected {(len(rows), len(sizes))}")
    if offset < 0 or bool((sizes < 0).any()):
        raise ValueError(f"offset {offset} and sizes must not be below 0")
    if rows and not 0 <= min(rows) <= max(rows) < count:
        raise ValueError(f"rows {list(rows)[:8]} of {count} objects")
    return offset + int(sizes.sum())


class Written:
    """Which bytes of an object have been written: disjoint runs in order."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        if self._runs and self._runs[-1][1] == start:
            self._runs[-1] = (self._runs[-1][0], end)
            return
        merged: list[tuple[int, int]] = []
        for run in sorted([*self._runs, (start, end)]):
            if merged and run[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], run[1]))
            else:
                merged.append(run)
        self._runs = merged

    def cut(self, start: int, end: int) -> None:
        """These bytes are unknown again."""
        left = [(first, min(last, start)) for first, last in self._runs]
        right = [(max(first, end), last) for first, last in self._runs]
        self._runs = sorted((first, last) for first, last in left + right if first < last)

    def covers(self, nbytes: int) -> bool:
        return self._runs == [(0, nbytes)]
