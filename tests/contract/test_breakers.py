"""A store that hangs is bypassed: nobody pays its deadline for ever, and it is used again once it is well."""

from __future__ import annotations

import time
from itertools import count

import pytest

from kvpool.core.breaker import BreakerState
from tests.contract.content import expected_output

PROMPT = list(range(100, 200))
LOOKUPS = {"lookup_timeout_ms": 60_000, "lookup_wait_ms": 1000}
FAST = {
    "lookup_timeout_ms": 50,
    "lookup_wait_ms": 1,
    "load_timeout_ms": 100,
    "lease_ms": 5000,
    "breaker_failures": 3,
    "breaker_cooldown_ms": 400,
}


def test_bc_091_lookups_that_hang_open_the_breaker_although_few_threads_can_hang(start):
    engine = start(options=FAST)
    engine.ask("a", PROMPT)
    engine.forget_local()
    gate = engine.store.close_gate("exists")
    for i in range(12):
        prompt = [t + 200 * (i + 1) for t in PROMPT]
        assert engine.ask(f"b{i}", prompt, 2) == expected_output(prompt, 2)
    assert engine.pool.breaker.state is not BreakerState.CLOSED
    gate.set()
    turns = count()

    def well() -> bool:
        time.sleep(0.05)
        prompt = [t + 6000 + 200 * (turn := next(turns)) for t in PROMPT]
        assert engine.ask(f"again{turn}", prompt, 2) == expected_output(prompt, 2)
        return engine.pool.breaker.state is BreakerState.CLOSED

    engine.until(well)
    assert engine.ask("c", PROMPT, 2) == expected_output(PROMPT, 2)
    engine.assert_clean()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_bc_091_loads_that_hang_open_the_breaker_and_it_recovers(start, policy):
    engine = start(options=FAST | LOOKUPS | {"negative_cache_ms": 1}, policy=policy, load_async=True)
    prompts = [[t + 200 * i for t in PROMPT] for i in range(8)]
    for i, prompt in enumerate(prompts):
        engine.ask(f"a{i}", prompt)
    engine.forget_local()
    gate = engine.store.close_gate("get")
    side = engine.ranks[0].worker_side
    for i, prompt in enumerate(prompts):
        answer = engine.ask(f"b{i}", prompt, 2)
        assert answer == expected_output(prompt, 2) or policy == "fail"
    assert side._load_breaker.opened >= 1
    gate.set()
    turns = count()

    def well() -> bool:
        """An engine with nothing to do does not step."""
        time.sleep(0.05)
        engine.ask(f"again{(turn := next(turns))}", [t + 6000 + 200 * turn for t in PROMPT], 2)
        return side._load_breaker.state is BreakerState.CLOSED

    engine.until(well)
    assert engine.ask("c", [t + 5000 for t in PROMPT], 2) == expected_output([t + 5000 for t in PROMPT], 2)
    engine.assert_clean()
