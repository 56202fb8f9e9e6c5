"""Plans: every head of every layer comes from exactly one prefill rank, whatever the sizes of both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.shards import head_span, layer_partition
from kvpool.transfer.messages import PageLayout, RankLayout, SpanLayout
from kvpool.transfer.plan import PlanError, plan_reads, publishes

HEAD_BYTES, LAYERS, BLOCKS = 4, 4, 5


class Side:
    """The ranks of one side, their memory filled with what each byte is of: (layer, head, block)."""

    def __init__(self, heads: int, tp: int, pp: int = 1, filled: bool = True, head_major: bool = True) -> None:
        self.layouts: list[RankLayout] = []
        self.memory: dict[int, np.ndarray] = {}
        base = 1 << 20
        for stage, layers in enumerate(layer_partition(LAYERS, pp)):
            for tp_rank in range(tp):
                span, rank = head_span(heads, tp, tp_rank), stage * tp + tp_rank
                local = span.last - span.first + 1
                memory = np.zeros((len(layers), BLOCKS, local, HEAD_BYTES), dtype=np.uint8)
                if filled:
                    for i, layer in enumerate(layers):
                        for block in range(BLOCKS):
                            for head in range(local):
                                memory[i, block, head] = self.value(layer, span.first + head, block)
                nbytes = local * HEAD_BYTES
                pages = tuple(
                    PageLayout(layer, f"layer{layer}", base + i * BLOCKS * nbytes, nbytes, nbytes) for i, layer in enumerate(layers)
                )
                one = SpanLayout(0, span.first, span.last, "", span.replica, span.replicas, head_major, pages)
                self.layouts.append(RankLayout(rank, (one,)))
                self.memory[rank] = memory.reshape(-1)
                self.base = base

    @staticmethod
    def value(layer: int, head: int, block: int) -> int:
        return 1 + layer + 8 * head + 50 * block % 100


def copied(prefill: Side, decode: Side, rank: int, choice: int, theirs: list[int], ours: list[int]) -> set[int]:
    """Do as the plan says; the prefill ranks that were read."""
    used = set()
    for reads in plan_reads(decode.layouts[rank], prefill.layouts, choice):
        used.add(reads.rank)
        runs = reads.runs(theirs, ours)
        for source, target, size in zip(*(a.tolist() for a in (runs.sources, runs.targets, runs.sizes)), strict=True):
            at, to = source - prefill.base, target - decode.base
            assert not decode.memory[rank][to : to + size].any(), "written twice"
            decode.memory[rank][to : to + size] = prefill.memory[reads.rank][at : at + size]
    return used


sizes = st.tuples(
    st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]), st.integers(0, 4)
)


@settings(max_examples=60)
@given(sizes, st.integers(0, 2**32))
def test_bc_016_bc_017_bc_018_every_head_exactly_once(case, choice):
    heads, prefill_tp, pp, shift = case
    decode_tp = max(1, prefill_tp >> shift)
    prefill, decode = Side(heads, prefill_tp, pp), Side(heads, decode_tp, filled=False)
    theirs, ours = [3, 1, 4], [0, 2, 1]
    for rank in range(decode_tp):
        copied(prefill, decode, rank, choice, theirs, ours)
        span = decode.layouts[rank].spans[0]
        local = span.last_head - span.first_head + 1
        memory = decode.memory[rank].reshape(LAYERS, BLOCKS, local, HEAD_BYTES)
        for layer in range(LAYERS):
            for head in range(local):
                for their, our in zip(theirs, ours, strict=True):
                    assert (memory[layer, our, head] == Side.value(layer, span.first_head + head, their)).all()
                assert not memory[layer, [3, 4], head].any()


@pytest.mark.parametrize("choice", range(4))
def test_replicas_take_turns_and_publish_what_is_read(choice):
    prefill, decode = Side(1, 4), Side(1, 1, filled=False)
    used = copied(prefill, decode, 0, choice, [1], [1])
    assert used == {choice}
    assert [layout.rank for layout in prefill.layouts if publishes(layout.spans[0], choice)] == [choice]


def test_more_decode_ranks_than_prefill_ranks_are_planned_too():
    prefill, decode = Side(4, 2), Side(4, 4, filled=False)
    for rank in range(4):
        copied(prefill, decode, rank, 0, [0], [0])


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        (Side(2, 1), Side(4, 1), "heads 2-3 are on no rank"),
        (Side(4, 2, head_major=False), Side(4, 1), "use the same tp_size"),
    ],
)
def test_what_does_not_fit_is_named(prefill, decode, told):
    with pytest.raises(PlanError, match=told):
        plan_reads(decode.layouts[0], prefill.layouts, 0)


def test_pages_of_other_sizes_are_named():
    prefill, decode = Side(2, 1), Side(2, 1)
    span = prefill.layouts[0].spans[0]
    pages = tuple(PageLayout(p.layer, p.name, p.base, p.stride, p.nbytes * 2) for p in span.pages)
    longer = RankLayout(0, (SpanLayout(0, 0, 1, "", 0, 1, True, pages),))
    with pytest.raises(PlanError, match="16 bytes on prefill, 8 on decode"):
        plan_reads(decode.layouts[0], [longer], 0)


def test_same_sizes_need_no_head_order():
    prefill, decode = Side(4, 2, head_major=False), Side(4, 2, filled=False, head_major=False)
    for rank in range(2):
        assert copied(prefill, decode, rank, 7, [2], [2]) == {rank}
