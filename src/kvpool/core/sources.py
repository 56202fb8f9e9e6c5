"""Where the tokens of a hit come from, when the blocks of several groups lie in several tiers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Tokens ``first`` to ``end`` (exclusive) come from the tier of this rank: 0 is the nearest. -1: from no store at all."""

    first: int
    end: int
    rank: int


def source_runs(groups: Sequence[tuple[int, int, Sequence[int]]], first: int, end: int) -> list[Run]:
    """``groups`` are (block size, first block, rank of each block from there on). Tokens that several groups cover count for the
    farthest tier; those that none covers (a sliding window needs no more of them) for none. In order, and without gaps."""
    if not groups or first >= end:
        return []
    uniform = {rank for _, _, ranks in groups for rank in ranks}
    whole = any(block * size <= first and (block + len(ranks)) * size >= end for size, block, ranks in groups)
    if len(uniform) == 1 and whole:
        return [Run(first, end, uniform.pop())]
    edges = {first, end}
    for size, block, ranks in groups:
        edges.update(t for t in range(block * size, (block + len(ranks) + 1) * size, size) if first < t < end)
    runs: list[Run] = []
    bounds = sorted(edges)
    for left, right in itertools.pairwise(bounds):
        covering = [ranks[left // size - block] for size, block, ranks in groups if block <= left // size < block + len(ranks)]
        rank = max(covering, default=-1)
        if runs and runs[-1].rank == rank:
            runs[-1] = runs[-1]._replace(end=right)
        else:
            runs.append(Run(left, right, rank))
    return runs


def tokens_by_rank(runs: Sequence[Run], first: int, end: int) -> dict[int, int]:
    """How many of tokens ``first`` to ``end`` come from each rank; no zero counts."""
    counts: dict[int, int] = {}
    for run in runs:
        tokens = min(run.end, end) - max(run.first, first)
        if tokens > 0:
            counts[run.rank] = counts.get(run.rank, 0) + tokens
    return counts
