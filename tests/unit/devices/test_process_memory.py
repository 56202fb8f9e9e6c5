"""How byte runs are cut into calls, and joined before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.devices import process_memory
from kvpool.devices.process_memory import joined, parts

INT = np.int64


def test_parts_keep_every_run_and_a_large_one_whole():
    sizes = np.array([60, 60, 300, 10, 10, 90], dtype=INT)
    assert [sizes[part].tolist() for part in parts(sizes, 100)] == [[60], [60], [300], [10, 10], [90]]


@given(st.lists(st.integers(0, 300), max_size=50), st.integers(1, 400), st.integers(1, 7))
def test_parts_cover_all_runs_in_order_within_both_limits(lengths, nbytes, runs):
    sizes, most = np.array(lengths, dtype=INT), process_memory.MAX_RUNS
    process_memory.MAX_RUNS = runs
    try:
        cut = [list(range(len(sizes)))[part] for part in parts(sizes, nbytes)]
    finally:
        process_memory.MAX_RUNS = most
    assert [row for rows in cut for row in rows] == list(range(len(sizes)))
    assert all(len(rows) <= runs and (len(rows) == 1 or sizes[rows].sum() <= nbytes) for rows in cut)


def test_runs_that_continue_on_both_sides_become_one_and_empty_ones_go():
    ones, others = np.array([0, 10, 10, 30, 50], dtype=INT), np.array([100, 110, 110, 130, 151], dtype=INT)
    sizes = np.array([10, 0, 20, 20, 5], dtype=INT)
    assert [a.tolist() for a in joined(ones, others, sizes)] == [[0, 50], [100, 151], [50, 5]]
