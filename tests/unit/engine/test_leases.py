"""A lease is renewed when half of what was granted is over, however short that is against what was asked for."""

import time
from types import SimpleNamespace

import pytest

from kvpool.core.breaker import Breaker
from kvpool.engine.job_table import JobTable
from kvpool.engine.matching import Matcher, MatchLimits
from kvpool.stores.base import Lease


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.mark.parametrize("granted", [0.5, 5.0, 60.0])
def test_half_of_what_was_granted(clock, granted):
    lease = Lease([], [], clock.now + granted)
    lease.since = clock.now
    assert not lease.half_over()
    clock.now += granted * 0.4
    assert not lease.half_over()
    clock.now += granted * 0.2
    assert lease.half_over()


def test_a_lease_knows_when_it_was_granted():
    before = time.monotonic()
    assert before <= Lease([], [], before + 1).since <= time.monotonic()


def test_a_hit_under_a_short_lease_is_not_stale_at_once():
    lease = Lease([], [], time.monotonic() + 5.0)
    limits = MatchLimits(wait_s=0.1, timeout_s=1.0, min_hit_tokens=0)
    matcher = Matcher(None, [SimpleNamespace(block_size=16, units=1)], limits, Breaker(1, 1.0), None)
    state = SimpleNamespace(found=SimpleNamespace(lease=lease))
    assert not matcher._stale(state)
    lease.since -= 6.0
    assert matcher._stale(state)


def test_a_job_under_a_short_lease_renews_it_once_half_of_it_is_over():
    renewed = []
    service = SimpleNamespace(renew=lambda lease: renewed.append(lease) or SimpleNamespace(done=lambda: False))
    table = JobTable(service, SimpleNamespace(pin=lambda *_, **__: None), 1)
    lease = Lease([], [], time.monotonic() + 5.0)
    table.open(SimpleNamespace(job_id=1, block_ids=[]), lease)
    table.renew_leases()
    assert renewed == []
    lease.since -= 6.0
    for _ in range(2):
        table.renew_leases()
    assert renewed == [lease]
