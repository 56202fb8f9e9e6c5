"""Decode's side of a transfer against prefill's real books and channel; only the bytes are not real."""

from __future__ import annotations

import threading

import pytest

from kvpool.ops.services.ports import free_port
from kvpool.stores.base import Result, Status
from kvpool.transfer.base import OneSidedEngine
from kvpool.transfer.channel import Caller, Responder
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import PageLayout, RankLayout, SpanLayout
from kvpool.transfer.offer import Offer
from kvpool.transfer.pull import Puller, PullError, Wanted
from kvpool.transfer.service import TransferService

RANK = RankLayout(0, (SpanLayout(0, 0, 0, "", 0, 1, True, (PageLayout(0, "layer0", 4096, 64, 64),)),))
WANTED = [Wanted(0, [0, 1], [3, 4])]
TRANSFER = "0" * 31 + "a"


class Reader(OneSidedEngine):
    """Reads nothing; ``gate`` holds a read until it is set, ``reading`` says that there is one."""

    name = "reader"
    call_bytes = 1 << 30

    def __init__(self, held=False):
        self.reading, self.gate = threading.Event(), threading.Event()
        if not held:
            self.gate.set()

    def open(self, regions):
        return

    def address(self):
        return b""

    def reach(self, address):
        return ""

    def _fetch(self, address, runs):
        self.reading.set()
        assert self.gate.wait(60)
        return Result(Status.OK, runs.nbytes)

    def close(self):
        return


@pytest.fixture
def prefill():
    """``prefill.offer()`` opens a transfer, ``prefill.puller(engine)`` makes rank 0 of a decode engine."""

    class Prefill:
        def __init__(self):
            self.port = free_port()
            self.ledger = Ledger(1, 600.0)
            self.service = TransferService(self.ledger, 1, "reader", {})
            self.service.record, self.service.ranks = "{}", (RANK,)
            self.responder = Responder("127.0.0.1", self.port, b"x", self.service.answer)
            self.caller = Caller(b"x")

        def offer(self):
            self.ledger.open(TRANSFER, "prompt", ((1, 2),), staged=False)
            return Offer(TRANSFER, self.service.instance, "127.0.0.1", self.port, 32, 480)

        def puller(self, engine):
            return Puller(engine, self.caller, RANK, 1, "{}", {})

    made = Prefill()
    yield made
    made.responder.close()
    made.caller.close()


def outcome(puller, offer, pull):
    try:
        return puller.pull(offer, pull, "prompt", WANTED, 60.0)
    except PullError as error:
        return str(error)


@pytest.mark.parametrize("first", ["A", "B"])
def test_two_decode_engines_with_one_offer_never_both_believe_what_they_read(prefill, first):
    """Both are reader 0. What one of them ends, the other must not take for held: the blocks are free by then."""
    offer, engines = prefill.offer(), {"A": Reader(held=True), "B": Reader(held=True)}
    found, second = {}, "B" if first == "A" else "A"
    threads = {
        name: threading.Thread(target=lambda name=name: found.update({name: outcome(prefill.puller(engines[name]), offer, name)}))
        for name in engines
    }
    threads[first].start()
    assert engines[first].reading.wait(60)
    threads[second].start()
    engines[second].reading.wait(0.5)  # not where it is refused, as it must be
    engines[first].gate.set()
    threads[first].join(60)
    assert found[first] == 128
    assert [c.reason for c in prefill.ledger.take_closed()] == [""], "its blocks are free"
    engines[second].gate.set()
    threads[second].join(60)
    assert "another pull" in found[second]
    assert "have ended" in outcome(prefill.puller(Reader()), offer, "C")
