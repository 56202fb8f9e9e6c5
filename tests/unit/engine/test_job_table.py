"""How long an idle engine goes on stepping for open jobs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpool.core.jobs import JobReport, SaveJob
from kvpool.engine import job_table
from kvpool.engine.job_table import HEARD_S, JobTable

DEADLINE_S = 10.0


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(job_table, "time", clock)
    return clock


@pytest.fixture
def table():
    pins = SimpleNamespace(pin=lambda *_, **__: None, unpin=lambda _: None)
    return JobTable(SimpleNamespace(release=lambda _: None), pins, world_size=1)


def save(number: int) -> SaveJob:
    return SaveJob(number, f"r{number}", [], DEADLINE_S, "namespace")


def test_the_end_of_a_job_at_its_deadline_is_heard(clock, table):
    table.open(save(1), None)
    clock.now += DEADLINE_S + 0.5 * HEARD_S
    assert table.busy(), "the worker gives it up just now"
    assert table.merge(1, JobReport(1)) is not None
    assert not table.busy()


def test_jobs_that_waited_for_others_are_heard_of(clock, table):
    for number in (1, 2, 3):
        table.open(save(number), None)
    for number in (1, 2, 3):
        clock.now += DEADLINE_S
        assert table.busy(), number
        table.merge(number, JobReport(1))
    assert not table.busy()


def test_a_call_that_never_ends_does_not_keep_an_idle_engine_busy(clock, table):
    table.open(save(1), None)
    table.open(save(2), None)
    table.merge(1, JobReport(1))
    clock.now += DEADLINE_S + HEARD_S + 0.1
    assert not table.busy()
    assert table.overdue()
