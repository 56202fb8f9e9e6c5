"""Heads, replicas and layers of ranks: every head and every layer is held, and every block is stored exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.keys import Shard, block_key, key_prefix
from kvpool.core.shards import HeadSpan, head_span, layer_partition, saves_block

SIZES = [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("heads", "tp"), list(itertools.product(SIZES, SIZES)))
def test_bc_017_bc_018_every_head_is_held_by_the_same_number_of_ranks(heads, tp):
    spans = [head_span(heads, tp, rank) for rank in range(tp)]
    holders = {head: [s for s in spans if s.first <= head <= s.last] for head in range(heads)}
    replicas = max(1, tp // heads)
    for held in holders.values():
        assert sorted(s.replica for s in held) == list(range(replicas))
        assert {s.replicas for s in held} == {replicas}
    assert all(type(number) is int for span in spans for number in span)


@pytest.mark.parametrize(("heads", "tp"), list(itertools.product(SIZES, SIZES)))
def test_bc_017_bc_018_bc_024_each_block_and_head_is_stored_exactly_once(heads, tp):
    for block in range(2 * tp + 1):
        stored = []
        for rank in range(tp):
            span = head_span(heads, tp, rank)
            if saves_block(block, span.replica, span.replicas):
                stored += range(span.first, span.last + 1)
        assert sorted(stored) == list(range(heads))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_bc_017_distinct_objects_of_a_block_are_as_many_as_heads(tp):
    heads = 2
    shards = {str(Shard(s.first, s.last, (0,))) for s in (head_span(heads, tp, rank) for rank in range(tp))}
    assert len(shards) == min(heads, tp)


@pytest.mark.parametrize("tp", SIZES)
def test_bc_025_a_latent_cache_is_one_shard_on_all_ranks(tp):
    spans = [head_span(1, tp, rank) for rank in range(tp)]
    assert [(s.first, s.last, s.replica, s.replicas) for s in spans] == [(0, 0, rank, tp) for rank in range(tp)]


@pytest.mark.parametrize(("heads", "prefill", "decode"), list(itertools.product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8])))
def test_bc_016_ranks_of_unequal_engines_share_a_key_only_for_the_same_heads(heads, prefill, decode):
    def keys(tp: int) -> dict[bytes, tuple[int, int]]:
        spans = [head_span(heads, tp, rank) for rank in range(tp)]
        return {block_key(key_prefix("n", 0, Shard(s.first, s.last, (0,))), b"h"): (s.first, s.last) for s in spans}

    one, other = keys(prefill), keys(decode)
    for key in one.keys() & other.keys():
        assert one[key] == other[key]
    if min(prefill, heads) != min(decode, heads):
        assert not one.keys() & other.keys(), "another split of the heads must miss, never read other heads"
    else:
        assert one == other


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (2, 3), (6, 4), (4, 6)])
def test_bc_018_sizes_that_do_not_divide_are_refused_in_words(heads, tp):
    with pytest.raises(ValueError, match="divide"):
        head_span(heads, tp, 0)


@pytest.mark.parametrize(("heads", "tp", "rank"), [(0, 1, 0), (4, 2, 2), (4, 2, -1), (-1, 1, 0)])
def test_ranks_and_heads_out_of_range_are_refused(heads, tp, rank):
    with pytest.raises(ValueError, match="no KV heads"):
        head_span(heads, tp, rank)


def test_head_span_names_its_parts():
    assert head_span(8, 4, 3) == HeadSpan(first=6, last=7, replica=0, replicas=1)
    assert head_span(2, 8, 5) == HeadSpan(first=1, last=1, replica=1, replicas=4)


@given(st.integers(1, 128), st.integers(1, 16))
def test_layer_partition_covers_all_layers_in_order(num_layers, stages):
    if stages > num_layers:
        return
    ranges = layer_partition(num_layers, stages)
    assert [layer for stage in ranges for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 128), st.integers(1, 16))
def test_bc_021_the_default_split_is_the_engines_own(num_layers, stages):
    utils = pytest.importorskip("vllm.distributed.utils")
    if stages > num_layers:
        return
    theirs = [range(*utils.get_pp_indices(num_layers, rank, stages)) for rank in range(stages)]
    assert layer_partition(num_layers, stages) == theirs


def test_bc_021_a_hand_made_split():
    assert layer_partition(61, 2, "30,31") == [range(30), range(30, 61)]
    assert layer_partition(61, 2) == [range(31), range(31, 61)]


@pytest.mark.parametrize("text", ["30,30", "31", "30,31,0", "a,b", "", "61,0", "62,-1"])
def test_bc_021_inconsistent_splits_are_refused_in_words(text):
    with pytest.raises(ValueError, match="layer partition"):
        layer_partition(61, 2, text)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_bc_024_replicas_share_the_saving_evenly_and_by_position_alone(replicas):
    shares = [[block for block in range(8 * replicas) if saves_block(block, r, replicas)] for r in range(replicas)]
    assert {len(share) for share in shares} == {8}
    assert sorted(block for share in shares for block in share) == list(range(8 * replicas))
