"""Worker threads and job runs: nothing waits for ever, and trouble of the store is told apart from a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tests.waiting import eventually

from kvpool.core.breaker import Breaker, BreakerState
from kvpool.core.jobs import LoadJob
from kvpool.engine import threads as module
from kvpool.engine.log_gate import LogGate
from kvpool.engine.runs import JobRun
from kvpool.engine.threads import WorkerThreads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_callbacks_run_before_wait_ends() -> None:
    threads = WorkerThreads("test", 1)
    for _ in range(200):
        seen: list[int] = []
        ticket = threads.submit(lambda: 1)
        ticket.then(lambda t, seen=seen: seen.append(t.value))
        assert ticket.wait(30)
        assert seen == [1]
    assert threads.close(30)


def test_stuck_only_while_every_thread_is_at_one_task(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 2)
    assert threads.stuck_for() == 0
    threads.submit(gate.wait)
    time.sleep(0.05)
    assert threads.stuck_for() == 0, "one thread is free"
    threads.submit(gate.wait)
    eventually(lambda: threads.stuck_for() > 0.05, "both are at one task")
    gate.set()
    assert threads.submit(lambda: 1).wait(30)
    assert threads.close(30)
    assert threads.stuck_for() == 0


def test_a_cancelled_task_drops_what_it_holds_and_never_runs(gate: threading.Event) -> None:
    threads = WorkerThreads("test", 1)
    threads.submit(gate.wait)
    ran: list[int] = []
    ticket = threads.submit(lambda: ran.append(1))
    ticket.cancel()
    assert ticket._task is None
    gate.set()
    assert ticket.wait(30)
    assert ran == []


def test_bc_107_every_thread_binds_its_device_first_and_one_that_cannot_fails_its_tasks() -> None:
    bound: list[str] = []
    threads = WorkerThreads("test", 3, lambda: bound.append(threading.current_thread().name))
    assert threads.submit(lambda: 1).wait(30)
    assert threads.close(30)
    assert len(set(bound)) == 3

    def broken() -> None:
        raise RuntimeError("no device")

    threads = WorkerThreads("test", 1, broken)
    ticket = threads.submit(lambda: 1)
    assert ticket.wait(30)
    assert isinstance(ticket.error, RuntimeError)


def test_the_clock_of_a_job_starts_when_a_thread_takes_it() -> None:
    run = JobRun(LoadJob(1, "r", [], -0.2, "n"))
    assert not run.overdue(stuck_for=0.0), "a queue that moves is no reason to give up"
    assert run.overdue(stuck_for=0.1)
    assert run.begin()
    time.sleep(0.1)
    assert run.overdue(stuck_for=0.0)
    assert run.conclude()
    assert not run.conclude()


def test_a_job_given_up_in_the_queue_never_begins() -> None:
    run = JobRun(LoadJob(1, "r", [], 1.0, "n"))
    assert run.conclude()
    assert not run.begin()
    assert not run.begun


def test_the_breaker_stays_open_while_nothing_but_overdue_jobs_is_heard() -> None:
    breaker = Breaker(failures=2, cooldown_s=60)
    for _ in range(2):
        breaker.failure()
    assert breaker.state is BreakerState.OPEN


def test_tasks_that_fail_by_the_thousand_are_a_few_lines(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    lines: list[str] = []
    monkeypatch.setattr(module.logger, "exception", lambda text, *args: lines.append(text % args))
    threads = WorkerThreads("test", 2)
    threads._log = LogGate(10.0, lambda: 0.0)  # however long it takes
    waiting = [threads.submit(gate.wait) for _ in range(2)]
    tickets = [threads.submit(lambda: 1 / 0) for _ in range(1000)]
    for ticket in tickets:
        ticket.then(lambda t: 1 // 0)
    gate.set()
    assert all(ticket.wait(30) for ticket in waiting)
    assert all(ticket.wait(30) for ticket in tickets)
    assert threads.close(30)
    assert 1 <= len(lines) <= 2, "one of the tasks, one of what follows them"
