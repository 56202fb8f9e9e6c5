"""Which listeners of a prefill engine a proxy knows, and which it forgets."""

from __future__ import annotations

import pytest

from kvpool.proxy import prefill_listeners
from kvpool.proxy.prefill_listeners import PrefillListeners
from kvpool.transfer.offer import Offer


def offer(port: int, instance: str) -> Offer:
    return Offer("a" * 32, instance, "127.0.0.1", port, 5, 480)


def ports(known: PrefillListeners) -> list[int]:
    return [one.port for one in known.offers()]


@pytest.fixture
def known() -> PrefillListeners:
    """Of an engine with two ranks that became ready once."""
    made = PrefillListeners()
    for port, instance in ((1, "a"), (2, "b"), (1, "a"), (2, "b")):
        made.note(offer(port, instance), starts=1)
    assert ports(made) == [1, 2]
    return made


def test_another_start_at_a_known_port_ends_all_ranks_of_the_one_before(known) -> None:
    known.note(offer(2, "c"), starts=1)
    assert ports(known) == [2]
    known.note(offer(1, "d"), starts=1)
    assert ports(known) == [2, 1]


def test_another_port_after_it_was_down_ends_them_too(known) -> None:
    known.note(offer(7, "c"), starts=2)
    assert ports(known) == [7]
    known.note(offer(8, "d"), starts=2)
    assert ports(known) == [7, 8]


def test_an_engine_that_was_only_out_of_reach_keeps_its_ranks(known) -> None:
    known.note(offer(1, "a"), starts=2)
    assert ports(known) == [1, 2]
    known.note(offer(3, "c"), starts=2)
    assert ports(known) == [1, 2, 3]


def test_what_is_gone_is_forgotten_unless_it_was_started_anew_meanwhile(known) -> None:
    first = offer(1, "a")
    known.forget(first)
    known.forget(first)
    assert ports(known) == [2]
    known.note(offer(1, "c"), starts=1)
    known.forget(first)
    assert ports(known) == [2, 1]


def test_their_number_is_bounded(known, monkeypatch) -> None:
    monkeypatch.setattr(prefill_listeners, "MOST", 3)
    for port in (3, 4):
        known.note(offer(port, str(port)), starts=1)
    assert ports(known) == [2, 3, 4]
