"""Calls that cannot be abandoned: a deadline ends the wait, never the call; a thread never dies; close tells."""

import threading
import time

import pytest

from kvpool.stores.base import Result, Status
from kvpool.stores.native import Closed, NativeCalls, Transfer

OK = Result(Status.OK)


@pytest.fixture
def calls():
    made = NativeCalls("test", 1)
    yield made
    made.close(30)


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def fault(error: BaseException) -> Result:
    return Result(Status.TRANSIENT, text=type(error).__name__)


def test_a_call_and_its_value(calls):
    call = calls.begin(lambda: 7, 30)
    assert call.wait(30)
    assert call.value() == 7
    assert calls.ask(lambda: threading.current_thread().daemon, 30)


def test_whatever_a_call_raises_the_thread_goes_on(calls):
    def leave():
        raise SystemExit

    with pytest.raises(SystemExit):
        calls.ask(leave, 30)
    with pytest.raises(ZeroDivisionError):
        calls.ask(lambda: 1 / 0, 30)
    assert calls.ask(lambda: "alive", 30) == "alive"


def test_a_deadline_ends_the_wait_and_not_the_call(calls, gate):
    begun = threading.Event()
    call = calls.begin(lambda: [OK] * (begun.set() or 1 + gate.wait(30)), 1.0)
    transfer = Transfer(call, 2, fault)
    assert begun.wait(30)
    assert not transfer.wait(1.1)
    assert not transfer.abandon(), "the library is at the memory"
    with pytest.raises(ValueError):
        transfer.results()
    gate.set()
    assert transfer.wait(30)
    assert transfer.results() == [OK, OK]


def test_what_has_not_begun_can_be_abandoned_and_never_begins(calls, gate):
    ran = []
    first = calls.begin(gate.wait, 30)
    transfer = Transfer(calls.begin(lambda: ran.append(1) or [OK], 30), 1, fault)
    assert transfer.abandon()
    assert transfer.done()
    gate.set()
    assert first.wait(30)
    assert calls.ask(lambda: "next", 30) == "next"
    assert ran == []
    assert transfer.results() == [Result(Status.TRANSIENT, text="TimeoutError")]


def test_a_call_whose_turn_comes_too_late_does_not_begin(calls, gate):
    ran = []
    calls.begin(gate.wait, 30)
    late = calls.begin(lambda: ran.append(1), 0.05)
    time.sleep(0.1)
    gate.set()
    assert late.wait(30)
    with pytest.raises(TimeoutError):
        late.value()
    assert ran == []


def test_ask_gives_up_in_time(calls, gate):
    calls.begin(gate.wait, 30)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        calls.ask(lambda: 1, 0.05)
    assert time.monotonic() - began < 10


def test_close_tells_whether_a_call_still_runs(gate):
    calls = NativeCalls("test", 2)
    running, waiting = calls.begin(gate.wait, 30), [calls.begin(lambda: 1, 30) for _ in range(3)]
    assert all(call.wait(30) for call in waiting)
    assert not calls.close(0.05)
    with pytest.raises(Closed):
        calls.ask(lambda: 1, 1)
    gate.set()
    assert running.wait(30)
    assert calls.close(30)


def test_threads_are_as_many_as_needed(calls):
    many = NativeCalls("many", 3)
    barrier = threading.Barrier(3)
    together = [many.begin(lambda: barrier.wait(30), 30) for _ in range(3)]
    assert all(call.wait(30) for call in together)
    assert sorted(call.value() for call in together) == [0, 1, 2]
    assert many.close(30)


def test_a_thread_that_cannot_be_started_is_tried_again(calls, gate, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        call = calls.begin(lambda: 1, 30)
        assert call.done()
        with pytest.raises(OSError, match="no thread"):
            call.value()
    assert calls.ask(lambda: 2, 30) == 2
    two = NativeCalls("two", 2)
    first = two.begin(gate.wait, 30)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        waits = two.begin(lambda: 3, 30)
    assert two.ask(lambda: 4, 30) == 4, "by the second thread"
    assert waits.wait(30)
    assert waits.value() == 3
    gate.set()
    assert first.wait(30)
    assert two.close(30)


def test_a_wrong_number_of_answers_is_a_failure_of_all(calls):
    transfer = Transfer(calls.begin(lambda: [OK], 30), 2, fault)
    assert transfer.wait(30)
    assert [result.status for result in transfer.results()] == [Status.FATAL] * 2
