"""What is easily counted twice, or not at all: requests that wait, loads that no store call has ended."""

from __future__ import annotations

import time

import pytest

from kvpool.engine.store_gauges import StoreGauges
from kvpool.stores.base import Result, Status
from tests.contract.fakestore import FakeStore
from tests.contract.test_metrics import PROMPT, count_asking, flush, reasons, stored, total


def test_what_the_engine_comes_to_hold_while_a_request_waits_for_room_is_not_asked_of_the_pool(start):
    """It was asked for once, found no room, and was asked for again when nothing of the pool could help any more."""
    engine = start()
    request = engine.request("a", PROMPT[:65])
    engine.pool.matched_tokens(request, 0)
    assert engine.pool._state(request).outcome is not None
    assert engine.pool.matched_tokens(request, 64) == (0, False)
    engine.pool._matcher.count(engine.pool._state(request), loading=False)
    assert "lookups" not in engine.pool.stats.data
    engine.pool.finished(request)


def test_tokens_of_a_load_that_failed_are_not_counted_again_where_the_store_is_bypassed_then(start):
    engine = stored(start, load_async=True, policy="recompute", options={"breaker_failures": 1, "breaker_cooldown_ms": 60000})
    engine.store.fail_keys("get", lambda key: True, Result(Status.TRANSIENT))
    counted = count_asking(engine)
    assert (counted["lookups"], reasons(counted), counted["queried_tokens"]) == (2, {"breaker_open": 1}, 96)


@pytest.mark.parametrize("kind", ["overdue", "breaker_open", "error"])
def test_loads_that_no_store_call_has_ended_count_as_failed(start, kind):
    options = {"load_timeout_ms": 50, "breaker_cooldown_ms": 60000}
    engine = stored(start, FakeStore(abandonable=False), load_async=True, policy="recompute", options=options)
    side = engine.ranks[0].worker_side
    gate = engine.store.close_gate("get") if kind == "overdue" else None
    if kind == "breaker_open":
        for _ in range(5):
            side._load_breaker.failure()
    if kind == "error":
        side._transfers.load = lambda job: 1 / 0
    counted = count_metrics_of(engine, gate)
    assert counted[f"load_failures/reason={kind}"] == 6
    assert counted["loads/reason=failed"] == 1
    assert total(counted, "loads") == 1


def count_metrics_of(engine, gate):
    engine.forget_local()
    counted = engine.count_metrics()
    engine.ask("b", PROMPT)
    if gate is not None:
        gate.set()
    flush(engine)
    return counted


def test_a_picture_that_is_none_does_not_end_the_thread_of_gauges():
    store = FakeStore()
    store.stats = lambda: None
    gauges = StoreGauges(store, seconds=0.001)
    time.sleep(0.02)
    assert gauges._thread.is_alive()
    gauges.close()
    assert not gauges._thread.is_alive()
