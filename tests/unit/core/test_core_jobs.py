"""Jobs: splitting loses nothing, merging counts everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.jobs import JobPart, JobReport, SaveJob, block_names, split_part

NAMES = st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=4)), max_size=4)


@given(st.integers(0, 8), st.integers(0, 10))
def test_splitting_a_part_loses_nothing(count, room):
    part = JobPart(2, list(range(count)), [bytes([i]) for i in range(count)], [i + 7 for i in range(count)])
    kept, rest = split_part(part, room)
    assert len(kept) == min(count, room)
    assert (kept.group, rest.group) == (2, 2)
    for name in ("indexes", "hashes", "block_ids"):
        assert getattr(kept, name) + getattr(rest, name) == getattr(part, name)


def test_a_job_knows_its_blocks_over_all_parts():
    job = SaveJob(1, "r", [JobPart(0, [0, 1], [b"a", b"b"], [5, 6]), JobPart(1, [3], [b"c"], [7])], 1.0, "n")
    assert job.block_ids == [5, 6, 7]
    assert job.num_blocks == 3
    assert block_names(job.parts) == [(0, b"a"), (0, b"b"), (1, b"c")]


@given(st.lists(st.tuples(st.integers(0, 1), NAMES, NAMES), max_size=5))
def test_merging_reports_counts_ranks_and_keeps_all_names(reports):
    total = JobReport()
    for ranks, unsaved, failed in reports:
        total.merge(JobReport(ranks, list(unsaved), list(failed)))
    assert total.ranks == sum(r for r, _, _ in reports)
    assert total.unsaved == [name for _, unsaved, _ in reports for name in unsaved]
    assert total.failed == [name for _, _, failed in reports for name in failed]
