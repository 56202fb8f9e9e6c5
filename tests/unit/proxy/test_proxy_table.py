"""Who gets the next request: load, affinity, states; loads come back to zero whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.proxy.addresses import Address
from kvpool.proxy.table import NoInstanceError, Side, State, Table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(prefill: int = 2, decode: int = 1, **more) -> Table:
    made = Table(**more)
    for side, count in ((Side.PREFILL, prefill), (Side.DECODE, decode)):
        for number in range(count):
            made.add(side, Address("h", 100 + number))
    for one in made.instances():
        made.report(one, True)
    return made


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    made = table(3)
    ports = [made.claim(Side.PREFILL, 100).instance.address.port for _ in range(6)]
    assert sorted(ports[:3]) == sorted(ports[3:]) == [100, 101, 102]
    with made.claim(Side.PREFILL, 1000) as large:
        assert made.claim(Side.PREFILL, 1).instance is not large.instance


def test_work_weighs_more_than_kv_that_waits() -> None:
    made = table(2)
    held = made.claim(Side.PREFILL, 1000)
    held.hold()
    assert (held.instance.active, held.instance.held) == (0, 1000)
    working = made.claim(Side.PREFILL, 400)
    assert working.instance is not held.instance
    assert made.claim(Side.PREFILL, 1).instance is held.instance  # 300 against 400


def test_a_prefix_prefers_one_instance_until_it_is_too_busy() -> None:
    made = table(4, slack=1000)
    first = made.claim(Side.PREFILL, 600, b"prefix").instance
    assert made.claim(Side.PREFILL, 600, b"prefix").instance is first
    assert made.claim(Side.PREFILL, 600, b"prefix").instance is not first
    fresh = table(4)
    assert len({fresh.claim(Side.PREFILL, 0, b"%d" % number).instance for number in range(64)}) == 4


def test_a_prefix_keeps_its_instance_when_another_leaves() -> None:
    made = table(4)
    before = {number: made.claim(Side.PREFILL, 0, b"%d" % number).instance for number in range(32)}
    gone = made.instances(Side.PREFILL)[0]
    made.drain(Side.PREFILL, gone.address, 0)
    for number, instance in before.items():
        if instance is not gone:
            assert made.claim(Side.PREFILL, 0, b"%d" % number).instance is instance


def test_failed_instances_come_last_and_down_ones_not_at_all() -> None:
    made = table(2, down_after=2)
    one, two = made.instances(Side.PREFILL)
    assert made.claim(Side.PREFILL, 0, without={one.address}).instance is two
    assert not made.report(one, False)
    assert made.report(one, False)
    assert one.state is State.DOWN
    assert made.claim(Side.PREFILL, 0, without={two.address}).instance is two  # no other is ready
    assert made.report(one, True)
    made.drain(Side.DECODE, Address("h", 100), 1)
    with pytest.raises(NoInstanceError, match="no decode instance is ready"):
        made.claim(Side.DECODE, 1)


def test_draining_ends_with_the_last_request_or_with_its_time() -> None:
    clock = Clock()
    made = table(2, clock=clock)
    one, two = made.instances(Side.PREFILL)
    claim = made.claim(Side.PREFILL, 5, without={two.address})
    assert made.drain(Side.PREFILL, one.address, 10) is one
    assert not made.report(one, True)  # a probe does not bring it back
    assert one in made.instances()
    claim.release()
    assert one not in made.instances()
    stuck = made.claim(Side.PREFILL, 5)
    made.drain(Side.PREFILL, two.address, 10)
    assert not made.sweep()
    clock.now = 10
    assert made.sweep() == [two]
    stuck.release()
    assert made.drain(Side.PREFILL, two.address, 1) is None


def test_added_instances_are_given_up_unless_they_answer() -> None:
    clock = Clock()
    made = Table(clock=clock)
    assert made.add(Side.DECODE, Address("h", 1), 5)
    assert not made.add(Side.DECODE, Address("h", 1), 5)
    assert made.add(Side.DECODE, Address("h", 2), 5)
    made.report(made.instances()[0], True)
    clock.now = 6
    assert [one.address.port for one in made.sweep()] == [2]
    assert [one.address.port for one in made.instances()] == [1]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["claim", "hold", "grow", "release", "drain", "add", "fail", "ok"]), st.integers(0, 7))
)


@settings(max_examples=200)
@given(ACTIONS)
def test_loads_are_those_of_the_open_claims(actions) -> None:
    made, claims = table(3, 0), []
    everybody = set(made.instances())
    for action, number in actions:
        instances = made.instances()
        if action == "claim" and made.ready(Side.PREFILL):
            claims.append(made.claim(Side.PREFILL, number * 10, b"p" if number % 2 else None))
        elif action in ("hold", "grow", "release") and claims:
            claim = claims[number % len(claims)]
            {"hold": claim.hold, "grow": lambda c=claim: c.grow(3), "release": claim.release}[action]()
        elif action == "add":
            made.add(Side.PREFILL, Address("h", 100 + number))
        elif instances:
            one = instances[number % len(instances)]
            if action == "drain":
                made.drain(Side.PREFILL, one.address, 100)
            else:
                made.report(one, action == "ok")
        everybody |= set(made.instances())
        assert all(one.active >= 0 and one.held >= 0 and one.requests >= 0 for one in everybody)
        draining = [one for one in made.instances() if one.state is State.DRAINING]
        assert all(not one.idle for one in draining)
    for claim in claims:
        claim.release()
        claim.release()
    assert {(one.active, one.held, one.requests) for one in everybody} <= {(0, 0, 0)}
