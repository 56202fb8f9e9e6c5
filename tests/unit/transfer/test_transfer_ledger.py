"""The books of prefill: every transfer ends exactly once, and readers are told the truth."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.transfer.ledger import Ledger

TABLES = ((1, 2), (0, 3))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def opened(clock, readers=1, staged=False, timeout=10.0):
    ledger = Ledger(readers, timeout, clock)
    ledger.open("t", "prompt", TABLES, staged)
    return ledger


def closed(ledger):
    return [(c.transfer_id, c.reason) for c in ledger.take_closed()]


def test_read_by_all(clock):
    ledger = opened(clock, readers=2)
    for reader in (0, 1):
        assert ledger.begin("t", "A", reader, "prompt") == TABLES
    assert ledger.end("t", "A", 0) == ""
    assert closed(ledger) == []
    assert ledger.end("t", "A", 1) == ""
    assert closed(ledger) == [("t", "")]
    assert len(ledger) == 0


@pytest.mark.parametrize("order", list(permutations(["end", "end", "time", "release"])))
def test_bc_135_whatever_comes_first_ends_it_once(clock, order):
    ledger, ends = opened(clock), []
    assert ledger.begin("t", "A", 0, "prompt") == TABLES
    for event in order:
        if event == "end":
            assert bool(ledger.end("t", "A", 0)) == (clock.now >= 110 and ends == ["time"])
        elif event == "time":
            clock.now += 10
        else:
            ledger.release("t", "nobody wants it")
        news = closed(ledger)
        ends += [event for _ in news]
    assert len(ends) == 1
    assert ends[0] in ("end", "time")  # a reader is at it: a release does not take it away


def test_bc_135_done_for_an_unknown_transfer(clock):
    ledger = opened(clock)
    assert "unknown" in ledger.end("x", "A", 0)
    assert closed(ledger) == []


def test_a_repetition_is_answered_the_same(clock):
    ledger = opened(clock)
    ledger.begin("t", "A", 0, "prompt")
    assert ledger.end("t", "A", 0) == ledger.end("t", "A", 0) == ""
    late = opened(clock)
    late.begin("t", "A", 0, "prompt")
    clock.now += 11
    first = late.end("t", "A", 0)
    assert "had not read it" in first
    assert late.end("t", "A", 0) == first
    assert len(closed(late)) == 1


def test_time_counts_although_nobody_swept(clock):
    ledger = opened(clock)
    clock.now += 11
    assert "had not read it after 10 s" in ledger.begin("t", "A", 0, "prompt")
    assert [t for t, _ in closed(ledger)] == ["t"]


@pytest.mark.parametrize(
    ("reader", "prompt", "told"), [(0, "other", "another prompt"), (1, "prompt", "reader 1"), (-1, "prompt", "reader -1")]
)
def test_who_may_not_read(clock, reader, prompt, told):
    ledger = opened(clock)
    assert told in ledger.begin("t", "A", reader, prompt)


def test_staged_is_waited_for(clock):
    ledger = opened(clock, staged=True)
    assert ledger.begin("t", "A", 0, "prompt") is None
    ledger.published("t")
    assert ledger.begin("t", "A", 0, "prompt") == TABLES


def test_staged_that_failed_is_gone(clock):
    ledger = opened(clock, staged=True)
    ledger.published("t", "no space")
    assert "no space" in ledger.begin("t", "A", 0, "prompt")
    assert len(closed(ledger)) == 1
    ledger.published("t")


def test_release_before_anybody_reads(clock):
    ledger = opened(clock)
    ledger.release("t", "decode has it")
    ledger.release("t", "again")
    ledger.release("x", "unknown")
    assert closed(ledger) == [("t", "decode has it")]
    assert "decode has it" in ledger.begin("t", "A", 0, "prompt")


def test_what_is_released_by_force_before_it_is_opened_is_never_open(clock):
    """A proxy gives a prefill request up while the engine is still computing it."""
    ledger = Ledger(1, 10.0, clock)
    ledger.release("t", "nobody waits for it", force=True)
    ledger.release("other", "decode has another prompt")
    assert not ledger.open("t", "prompt", TABLES, staged=False)
    assert ledger.open("other", "prompt", TABLES, staged=False)
    assert "unknown" in ledger.begin("t", "A", 0, "prompt")
    assert len(ledger) == 1
    assert closed(ledger) == []
    clock.now += 11
    assert ledger.open("t", "prompt", TABLES, staged=False), "no request is computed as long as that"


def test_bounded_is_what_is_remembered_of_transfers_that_never_were(clock, monkeypatch):
    monkeypatch.setattr("kvpool.transfer.ledger.REMEMBERED", 4)
    ledger = Ledger(1, 10.0, clock)
    for number in range(8):
        ledger.release(f"t{number}", "nobody waits for it", force=True)
    opens = [ledger.open(f"t{number}", "prompt", TABLES, staged=False) for number in range(8)]
    assert opens == [True] * 4 + [False] * 4


def test_one_pull_reads_a_transfer(clock):
    ledger = opened(clock, readers=2)
    assert "has not begun" in ledger.end("t", "A", 0)
    assert ledger.begin("t", "A", 0, "prompt") == TABLES
    assert "another pull" in ledger.begin("t", "B", 0, "prompt")
    assert "another pull" in ledger.begin("t", "B", 1, "prompt")
    assert "another pull" in ledger.end("t", "B", 0)
    assert "reader 1 has not begun" in ledger.end("t", "A", 1)
    assert ledger.begin("t", "A", 1, "prompt") == TABLES
    assert ledger.end("t", "A", 0) == ledger.end("t", "A", 1) == ""
    assert closed(ledger) == [("t", "")]
    assert ledger.end("t", "A", 0) == ""
    assert "have ended" in ledger.end("t", "B", 0), "freed blocks are held for nobody"


def test_a_pull_that_is_over_ends_what_it_had_begun(clock):
    ledger = opened(clock, readers=2)
    ledger.begin("t", "A", 0, "prompt")
    ledger.release("t", "nobody wants it")
    ledger.release("t", "another failed", "B")
    assert closed(ledger) == []
    ledger.release("t", "it failed", "A")
    assert closed(ledger) == [("t", "it failed")]
    assert ledger.end("t", "A", 0) == "it failed"
    forced = opened(clock)
    assert forced.begin("t", "A", 0, "prompt")
    forced.release("t", "nobody waits for it")
    assert not closed(forced)
    forced.release("t", "nobody waits for it", force=True)
    forced.release("t", "nobody waits for it", force=True)
    assert len(closed(forced)) == 1
    assert forced.end("t", "A", 0) == "nobody waits for it", "what was read is worth nothing"
    unread = opened(clock)
    unread.release("t", "it failed before it began", "B")
    assert len(closed(unread)) == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["open", "begin", "end", "release", "time", "sweep", "drop"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.sampled_from("AB"),
    )
)


@given(EVENTS)
def test_every_transfer_ends_exactly_once_and_held_means_held(events):
    clock = Clock()
    ledger, known, over = Ledger(3, 10.0, clock), set(), []
    owners: dict[str, str] = {}
    for event, number, reader, pull in events:
        name = f"t{number}"
        if event == "open" and name not in known:
            known.add(name)
            ledger.open(name, "p", TABLES, staged=False)
        elif event == "begin":
            if isinstance(ledger.begin(name, pull, reader, "p"), tuple):
                assert owners.setdefault(name, pull) == pull
        elif event == "end":
            before = name in over
            told = ledger.end(name, pull, reader)
            assert told or owners[name] == pull
            if before and told == "":
                assert ledger.end(name, pull, reader) == ""
        elif event == "release":
            ledger.release(name, "no")
        elif event == "time":
            clock.now += 4
        elif event == "drop":
            ledger.drop_all("reset")
        over += [c.transfer_id for c in ledger.take_closed()] if event == "sweep" else []
    clock.now += 100
    over += [c.transfer_id for c in ledger.take_closed()]
    assert sorted(over) == sorted(known)
    assert len(ledger) == 0
