"""Releases are repeated until prefill has heard them, never for longer than it holds anything, and nobody waits for that."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time

import pytest

from kvpool.transfer import release as module
from kvpool.transfer.channel import Caller, Responder
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import Refused
from kvpool.transfer.offer import Offer
from kvpool.transfer.release import Outcome, Releaser
from kvpool.transfer.service import TransferService

SECRET = b"a secret of tests"


def until(condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


class Prefill:
    """Its channel and its books. While ``busy`` is set no question is answered; ``asked`` counts those that were taken."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.ledger = Ledger(1, 600.0)
        self.service = TransferService(self.ledger, 1, "process_vm", {})
        self.busy, self.asked, self.refuses, self.responder = threading.Event(), 0, 0, None
        self.opened = 0

    def start(self):
        self.responder = Responder("127.0.0.1", self.port, SECRET, self._answer)
        return self

    def close(self):
        self.busy.clear()
        if self.responder is not None:
            self.responder.close()

    def offer(self, hold_s=600, instance=None):
        self.opened += 1
        transfer_id = f"{self.opened:032x}"
        assert self.ledger.open(transfer_id, "prompt", ((1,),), staged=False)
        return Offer(transfer_id, instance or self.service.instance, "127.0.0.1", self.port, 5, hold_s)

    def _answer(self, request):
        self.asked += 1
        end = time.monotonic() + 20
        while self.busy.is_set() and time.monotonic() < end:
            time.sleep(0.005)
        if self.refuses:
            self.refuses -= 1
            return Refused("internal error")
        return self.service.answer(request)


@pytest.fixture
def prefill():
    made = Prefill()
    yield made
    made.close()


@pytest.fixture
def releaser(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "RETRY_MOST_S", 0.2)
    made = Releaser(Caller(SECRET), 2)
    yield made
    made.close(0.0)


def test_what_a_busy_prefill_does_not_hear_is_told_once_it_listens(prefill, releaser):
    prefill.start().busy.set()
    came, began = [], time.monotonic()
    for _ in range(5):
        releaser.release(prefill.offer(), "the client has gone", force=True, then=came.append)
    assert time.monotonic() - began < 5 * module.ANSWER_S, "who releases waits"
    time.sleep(1.0)
    assert (len(prefill.ledger), came, releaser.backlog()) == (5, [], 5)
    prefill.busy.clear()
    until(lambda: not len(prefill.ledger))
    until(lambda: came == [Outcome.TOLD] * 5)
    assert {closed.reason for closed in prefill.ledger.take_closed()} == {"the client has gone"}
    assert releaser.backlog() == 0


def test_a_prefill_that_is_out_of_reach_is_told_once_it_is_back(prefill, releaser):
    came = []
    releaser.release(prefill.offer(), "nobody waits", force=True, then=came.append)
    time.sleep(0.6)
    assert not came
    prefill.start()
    until(lambda: came == [Outcome.TOLD])
    assert not len(prefill.ledger)


def test_questions_become_rare_and_one_is_for_all_that_waits(prefill, releaser, monkeypatch):
    """Each question without an answer takes 0.1 s, the pauses between them 0.1, 0.2 and then 0.4 s."""
    for name, seconds in (("ANSWER_S", 0.1), ("RETRY_S", 0.1), ("RETRY_MOST_S", 0.4)):
        monkeypatch.setattr(module, name, seconds)
    lines = []
    line = Caller.line
    monkeypatch.setattr(Caller, "line", lambda caller, *where: lines.append(time.monotonic()) or line(caller, *where))
    for _ in range(50):
        releaser.release(prefill.offer(), "nobody waits", force=True)
    until(lambda: len(lines) >= 5)
    gaps = [later - sooner for sooner, later in itertools.pairwise(lines)]
    assert gaps[0] >= 0.2
    assert gaps[1] >= 0.3
    assert min(gaps[2:]) >= 0.5


def test_nobody_is_asked_for_longer_than_prefill_holds_it(prefill, releaser):
    came, began = [], time.monotonic()
    releaser.release(prefill.offer(hold_s=1), "nobody waits", force=True, then=came.append)
    until(lambda: came == [Outcome.UNREACHABLE])
    assert time.monotonic() - began >= 1.0
    assert releaser.backlog() == 0
    prefill.start()
    time.sleep(0.5)
    assert prefill.asked == 0


def test_another_start_of_prefill_ends_it(prefill, releaser):
    prefill.start()
    came = []
    releaser.release(prefill.offer(instance="older"), "nobody waits", force=True, then=came.append)
    until(lambda: came == [Outcome.RESTARTED])


def test_a_refusal_is_no_answer(prefill, releaser):
    prefill.start().refuses = 2
    came = []
    releaser.release(prefill.offer(), "nobody waits", force=True, then=came.append)
    until(lambda: came == [Outcome.TOLD])
    assert prefill.asked == 3


def test_the_queue_is_bounded_and_the_longest_gives_way(prefill, releaser, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 10)
    other, came, others = Prefill(), [], []
    releaser.release(other.offer(), "nobody waits", force=True, then=others.append)
    for _ in range(20):
        releaser.release(prefill.offer(), "nobody waits", force=True, then=came.append)
    assert releaser.backlog() == 10
    assert (came, others) == ([Outcome.DROPPED] * 11, [])
    prefill.start()
    until(lambda: came.count(Outcome.TOLD) == 9)
    assert len(prefill.ledger) == 11
    assert not prefill.ledger.knows("f" * 32)
    assert [f"{number:032x}" in prefill.ledger._open for number in (11, 12)] == [True, False], "the oldest were dropped"


def test_one_that_is_silent_does_not_delay_another(prefill, releaser):
    silent, came = Prefill(), []
    for _ in range(30):
        releaser.release(silent.offer(), "nobody waits", force=True)
    began = time.monotonic()
    releaser.release(prefill.start().offer(), "nobody waits", force=True, then=came.append)
    until(lambda: came == [Outcome.TOLD])
    assert time.monotonic() - began < 2.0
    assert releaser.backlog() == 30


def test_the_same_release_waits_once(prefill, releaser):
    offer, came = prefill.offer(), []
    for _ in range(3):
        releaser.release(offer, "nobody waits", force=True, then=came.append)
    assert releaser.backlog() == 1
    prefill.start()
    until(lambda: came == [Outcome.TOLD])


def test_silence_is_one_line_in_the_log(prefill, releaser, caplog):
    with caplog.at_level(logging.WARNING, "kvpool.transfer"):
        for _ in range(3):
            releaser.release(prefill.offer(), "nobody waits", force=True)
        time.sleep(1.2)
    (line,) = caplog.messages
    assert f"tcp://127.0.0.1:{prefill.port}: no answer" in line
    assert "offers that nobody fetches" in line


def test_a_fault_of_one_release_ends_no_thread(prefill, releaser):
    came = []

    def breaks(outcome):
        raise ZeroDivisionError

    for then in (breaks, came.append):
        releaser.release(prefill.offer(), "nobody waits", force=True, then=then)
    prefill.start()
    until(lambda: came == [Outcome.TOLD])
    until(lambda: not len(prefill.ledger))


def test_close_tells_what_it_can_and_waits_for_nobody_that_is_silent(prefill, releaser):
    silent = Prefill()
    releaser.release(silent.offer(), "nobody waits", force=True)
    time.sleep(0.5)
    prefill.start()
    for _ in range(100):
        releaser.release(prefill.offer(), "nobody waits", force=True)
    began = time.monotonic()
    releaser.close(5.0)
    assert time.monotonic() - began < 3.0
    assert not len(prefill.ledger)
    releaser.release(prefill.offer(), "too late", force=True)
    assert len(prefill.ledger) == 1
    releaser.close(5.0)
