"""Storing for a side with other parallel sizes: one rank's layout cut into the shards of that side.

A decode rank with all layers and four heads stores, for a prefill side with two stages and TP 2, four objects a block, each named
and made as prefill's own ranks name and make them. What cannot be cut stays whole: the other side then finds nothing, never wrong
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvpool.core.keys import Shard
from kvpool.core.layout import BlockLayout, PageRun
from kvpool.core.shards import HeadSpan, head_span


@dataclass(frozen=True, slots=True)
class Split:
    """``stages`` are the layers of the other side's pipeline stages; ``tp_size`` is its tensor parallel size, at least ours."""

    stages: tuple[range, ...]
    tp_size: int


def split_layout(layout: BlockLayout, split: Split, total_heads: int, head_major: Collection[str]) -> list[BlockLayout]:
    """The layout cut by stages and heads. ``head_major`` names the layers whose pages are their heads, one after another."""
    own = HeadSpan(layout.shard.first_head, layout.shard.last_head, layout.replica, layout.replicas)
    cuttable = not layout.shard.note and all(page.name in head_major for page in layout.pages)
    heads = _head_parts(own, total_heads, split.tp_size) if cuttable else [(own.first, own.last)]
    stages = [[page for page in layout.pages if page.layer in stage] for stage in split.stages]
    if sum(map(len, stages)) != len(layout.pages):  # a drafter's layers: on the last stage, in a shard of their own
        stages = [list(layout.pages)]
    return [_cut(layout, own, pages, first, last) for pages in stages if pages for first, last in heads]


def _head_parts(own: HeadSpan, total_heads: int, tp_size: int) -> list[tuple[int, int]]:
    """The spans of the other side's ranks that make up ours exactly; ours as it is where they do not."""
    try:
        spans = {(s.first, s.last) for s in (head_span(total_heads, tp_size, rank) for rank in range(tp_size))}
    except ValueError:
        return [(own.first, own.last)]
    inside = sorted((a, b) for a, b in spans if own.first <= a and b <= own.last)
    whole = sum(b - a + 1 for a, b in inside) == own.last - own.first + 1
    return inside if whole else [(own.first, own.last)]


def _cut(layout: BlockLayout, own: HeadSpan, pages: Sequence[PageRun], first: int, last: int) -> BlockLayout:
    layers = tuple(sorted({page.layer for page in pages}))
    old = layout.shard
    shard = Shard(first, last, layers, old.pcp_rank, old.dcp_rank, old.note)
    count = own.last - own.first + 1
    runs = []
    for page in pages:
        width = page.nbytes // count
        whole = (first, last) == (own.first, own.last)
        start, nbytes = (0, page.nbytes) if whole else ((first - own.first) * width, (last - first + 1) * width)
        runs.append(replace(page, base=page.base + start, nbytes=nbytes))
    return replace(layout, shard=shard, pages=tuple(runs))
