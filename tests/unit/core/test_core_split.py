"""Cutting a layout into the shards of a side with other sizes: the same bytes, named as that side names them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvpool.core.keys import Shard
from kvpool.core.layout import BlockLayout, PageRun
from kvpool.core.shards import head_span, layer_partition
from kvpool.core.split import Split, split_layout

HEAD, STRIDE = 8, 1 << 10


def layout(heads: int, tp: int, rank: int, layers: int = 4, note: str = "") -> BlockLayout:
    span = head_span(heads, tp, rank)
    count = span.last - span.first + 1
    pages = tuple(PageRun(i, f"l{i}", i << 16, STRIDE, count * HEAD) for i in range(layers))
    shard = Shard(span.first, span.last, tuple(range(layers)), note=note)
    return BlockLayout(0, shard, pages, span.replica, span.replicas)


def names(heads: int, tp: int, pp: int) -> set[str]:
    """As the ranks of a side with these sizes name their shards."""
    spans = {head_span(heads, tp, rank)[:2] for rank in range(tp)}
    return {str(Shard(*span, tuple(stage))) for span in spans for stage in layer_partition(4, pp)}


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("own", [1, 2])
def test_the_parts_are_prefills_shards_and_nothing_is_lost(heads, tp, pp, own):
    if tp < own:
        return
    split, parts = Split(tuple(layer_partition(4, pp)), tp), []
    for rank in range(own):
        whole = layout(heads, own, rank)
        cut = split_layout(whole, split, heads, [p.name for p in whole.pages])
        merged = sorted((run.base, run.nbytes) for part in cut for run in part.pages)
        assert sum(n for _, n in merged) == whole.object_nbytes
        assert all(a + n <= b for (a, n), (b, _) in pairwise(merged))
        assert all((part.replica, part.replicas) == (whole.replica, whole.replicas) for part in cut)
        parts += [str(part.shard) for part in cut]
    assert set(parts) == names(heads, tp, pp)


def test_a_part_points_at_its_heads():
    cut = split_layout(layout(4, 1, 0), Split((range(4),), 2), 4, ["l0", "l1", "l2", "l3"])
    assert [str(part.shard) for part in cut] == ["h0-1_l0-3_c0_0", "h2-3_l0-3_c0_0"]
    assert cut[1].addresses([3]).tolist() == [[(i << 16) + 3 * STRIDE + 2 * HEAD for i in range(4)]]
    assert np.array_equal(cut[1].sizes, [2 * HEAD] * 4)


@pytest.mark.parametrize(("note", "ordered", "heads"), [("t2", True, 4), ("", False, 4), ("", True, 3)])
def test_what_cannot_be_cut_by_heads_stays_whole(note, ordered, heads):
    whole = layout(heads, 1, 0, note=note)
    cut = split_layout(whole, Split((range(4),), 2), heads, [p.name for p in whole.pages] if ordered else [])
    assert cut == [whole]


def test_layers_of_no_stage_stay_together():
    drafts = layout(2, 1, 0)
    moved = BlockLayout(0, Shard(0, 1, (4, 5)), tuple(PageRun(4 + i, f"mtp{i}", i << 16, STRIDE, 16) for i in range(2)))
    cut = split_layout(moved, Split((range(2), range(2, 4)), 1), 2, [])
    assert cut == [moved]
    assert len(split_layout(drafts, Split((range(2), range(2, 4)), 1), 2, [])) == 2
