"""The circuit breaker with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.breaker import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 5.0, clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allow()
        breaker.failure()


def test_it_opens_after_so_many_failures_in_a_row(breaker):
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()
    assert breaker.opened == 1


def test_a_success_in_between_starts_the_count_again(breaker):
    fail(breaker, 2)
    breaker.success()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_after_the_cooldown_one_call_goes_through_and_closes_it(breaker, clock):
    fail(breaker, 3)
    clock.now += 4.9
    assert not breaker.allow()
    clock.now += 0.2
    assert breaker.allow()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allow(), "one call only"
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow()


def test_a_failed_probe_opens_it_for_another_cooldown(breaker, clock):
    fail(breaker, 3)
    clock.now += 5.1
    assert breaker.allow()
    breaker.failure()
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.9
    assert not breaker.allow()
    clock.now += 0.2
    assert breaker.allow()
    assert breaker.opened == 1, "it never closed in between"


def test_bc_091_a_probe_that_never_comes_back_does_not_keep_it_half_open(breaker, clock):
    fail(breaker, 3)
    clock.now += 5.1
    assert breaker.allow()
    clock.now += 5.1
    assert breaker.allow(), "the lost probe is replaced"


def test_opened_counts_every_opening(breaker, clock):
    for _ in range(4):
        fail(breaker, 3)
        clock.now += 5.1
        assert breaker.allow()
        breaker.success()
    assert breaker.opened == 4


Events = st.lists(st.one_of(st.sampled_from(["ask", "ok", "bad"]), st.floats(0, 10)), max_size=60)


@given(Events)
def test_open_means_closed_to_calls_until_the_cooldown_has_passed(events):
    clock = Clock()
    breaker = Breaker(3, 5.0, clock)
    row, opened_at = 0, None
    for event in events:
        if isinstance(event, float):
            clock.now += event
        elif event == "ok":
            breaker.success()
            row, opened_at = 0, None
        elif event == "bad":
            breaker.failure()
            row += 1
            if row >= 3:
                opened_at = clock.now
        else:
            allowed = breaker.allow()
            assert allowed or opened_at is not None
            if opened_at is not None and clock.now - opened_at < 5.0:
                assert not allowed
            if allowed and opened_at is not None:
                opened_at = clock.now  # one probe a cooldown
        assert (breaker.state is BreakerState.CLOSED) == (opened_at is None)
