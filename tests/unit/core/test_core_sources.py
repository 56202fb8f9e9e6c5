"""Which tier the tokens of a hit come from."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.sources import Run, source_runs, tokens_by_rank

GROUPS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 6), st.lists(st.integers(0, 2), max_size=12)), min_size=1, max_size=3
)


def test_one_tier_is_one_run():
    assert source_runs([(16, 2, [1, 1, 1])], 32, 80) == [Run(32, 80, 1)]


def test_the_farthest_tier_of_a_token_counts():
    runs = source_runs([(16, 0, [0, 0, 0, 0]), (32, 1, [2])], 0, 64)
    assert runs == [Run(0, 32, 0), Run(32, 64, 2)]


def test_what_no_group_needs_comes_from_nowhere():
    assert source_runs([(16, 3, [0])], 0, 64) == [Run(0, 48, -1), Run(48, 64, 0)]


def test_nothing_is_no_run():
    assert source_runs([], 0, 16) == source_runs([(16, 0, [0])], 16, 16) == []


@given(GROUPS, st.integers(0, 20), st.integers(0, 30), st.integers(0, 60), st.integers(0, 60))
def test_it_is_what_counting_each_token_gives(groups, first, length, left, right):
    """Against the plainest way to count."""
    end = first + length
    runs = source_runs(groups, first, end)
    each = []
    for token in range(first, end):
        ranks = [r[token // size - block] for size, block, r in groups if block <= token // size < block + len(r)]
        each.append(max(ranks, default=-1))
    assert [run.rank for run in runs for _ in range(run.first, run.end)] == each
    assert all(a.end == b.first for a, b in itertools.pairwise(runs))
    counts = tokens_by_rank(runs, left, right)
    asked = [rank for token, rank in zip(range(first, end), each, strict=True) if left <= token < right]
    assert counts == {rank: asked.count(rank) for rank in set(asked)}
