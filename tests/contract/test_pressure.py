"""Too few blocks, too few threads: nobody waits for ever."""

from __future__ import annotations

import time
from itertools import count

import pytest

from tests.contract.content import expected_output

PROMPT = list(range(100, 200))
policies = pytest.mark.parametrize("policy", ["recompute", "fail"])


def warmed(start, *prompts, **fields):
    engine = start(**fields)
    for i, prompt in enumerate(prompts):
        engine.ask(f"warm{i}", prompt)
        engine.forget_local()
    return engine


@policies
def test_bc_112_calls_that_never_return_hold_up_no_other_request(start, policy):
    """More hung calls than threads: loads behind them fail by their deadline, the engine goes on, and the blocks come back."""
    prompts = [[i, *PROMPT] for i in range(4)]
    engine = warmed(start, *prompts, load_async=True, policy=policy, num_blocks=80, options={"load_timeout_ms": 100})
    gate = engine.store.close_gate("get")
    for i, prompt in enumerate(prompts):
        engine.add(f"b{i}", prompt, 3)
    engine.add("other", [5] * 10, 5)
    began = time.monotonic()
    engine.run()
    assert time.monotonic() - began < 40, "the gate opens after a minute"
    assert engine.answers["other"].tokens == expected_output([5] * 10, 5)
    for i, prompt in enumerate(prompts):
        assert engine.answers[f"b{i}"].tokens == (expected_output(prompt, 3) if policy == "recompute" else [])
    gate.set()
    engine.assert_clean()


def test_bc_112_saves_behind_a_hung_one_are_given_up_and_offered_again(start, monkeypatch):
    monkeypatch.setattr("kvpool.engine.saving.RETRY_S", 0.0)
    engine = start(options={"save_timeout_ms": 100, "breaker_failures": 50})
    gate = engine.store.close_gate("put")
    for i in range(3):
        prompt = [i, *PROMPT]
        assert engine.ask(f"a{i}", prompt, 3) == expected_output(prompt, 3)
    time.sleep(0.5)
    gate.set()
    engine.settle()
    turns = count()

    def all_stored() -> bool:
        turn = next(turns)
        for i in range(3):
            engine.ask(f"b{turn}-{i}", [i, *PROMPT])
            engine.settle()
        return len(engine.store.objects) == 18

    engine.until(all_stored)
    engine.assert_clean()


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("shapes", [(64, 48), (48, 64), (64, 64)])
def test_bc_113_two_loads_that_barely_fit_both_finish(start, drafts, shapes):
    prompts = [[i, *PROMPT[: length - 1]] for i, length in enumerate(shapes)]
    engine = warmed(start, *prompts, load_async=True, policy="recompute", num_blocks=8, drafts=drafts)
    for i, prompt in enumerate(prompts):
        engine.add(f"b{i}", prompt, 20)
    engine.run()
    for i, prompt in enumerate(prompts):
        assert engine.answers[f"b{i}"].tokens == expected_output(prompt, 20)
    engine.assert_clean()


def test_a_request_that_needs_the_blocks_of_a_slow_save_gets_them_in_the_end(start):
    engine = start(num_blocks=10, prefix_caching=False)
    engine.store.hold.add("put")
    engine.ask("a", PROMPT[:64], 2)
    engine.until(lambda: engine.store.held)
    assert engine.pool.open_counts()["pinned"] == 4
    engine.add("b", PROMPT[20:84], 60)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        engine.step()
        time.sleep(0.01)
    assert engine.answers["b"].reason is None, "it cannot have ended: there is no room"
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.run()
    assert engine.answers["b"].tokens == expected_output(PROMPT[20:84], 60)
    engine.assert_clean()


def test_waiting_for_a_young_save_spares_a_preemption(start, monkeypatch):
    monkeypatch.setattr("kvpool.engine.job_table.FREES_SOON_S", 600.0)
    engine = start(num_blocks=10, prefix_caching=False)
    engine.store.hold.add("put")
    engine.ask("a", PROMPT[:64], 2)
    engine.until(lambda: engine.store.held)
    engine.add("b", PROMPT[20:84], 60)
    for _ in range(40):
        engine.step()
    assert engine.requests["b"].num_preemptions == 0, "a save that is about to end is worth waiting for"
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.run()
    assert engine.requests["b"].num_preemptions == 0
    engine.assert_clean()


@pytest.mark.parametrize("kind", ["lookup", "load", "save"])
def test_a_young_save_of_a_sick_store_is_not_waited_for(start, monkeypatch, kind):
    """An open breaker, whichever: the blocks may not come back soon, so vLLM preempts as it would without us."""
    monkeypatch.setattr("kvpool.engine.job_table.FREES_SOON_S", 600.0)
    engine = start(num_blocks=10, prefix_caching=False, options={"breaker_failures": 1, "breaker_cooldown_ms": 3_600_000})
    engine.store.hold.add("put")
    engine.ask("a", PROMPT[:64], 2)
    engine.until(lambda: engine.store.held)
    assert engine.pool.will_free_blocks()
    side = engine.ranks[0].worker_side
    {"lookup": engine.pool.breaker, "load": side._load_breaker, "save": side._save_breaker}[kind].failure()
    engine.add("b", PROMPT[20:84], 60)
    engine.until(lambda: engine.requests["b"].num_preemptions > 0, step=True)
    assert not engine.pool.will_free_blocks()
    assert engine.pool.open_counts()["pinned"] >= 4, "the save is open all the time"
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.run()
    assert engine.answers["b"].tokens == expected_output(PROMPT[20:84], 60)
    engine.assert_clean()


@pytest.mark.parametrize("load_async", [False, True])
def test_many_waiting_requests_share_one_lookup_budget_a_step(start, load_async):
    """A slow store delays a step by the budget once, however many requests wait."""
    engine = start(load_async=load_async, max_seqs=32, options={"lookup_wait_ms": 500, "lookup_timeout_ms": 60_000})
    engine.ask("a", PROMPT)
    engine.forget_local()
    gate = engine.store.close_gate("exists")
    for i in range(20):
        engine.add(f"b{i}", [i, *PROMPT[:30]])
    began = time.monotonic()
    engine.step()
    assert time.monotonic() - began < 5, "a budget each would be 10 s"
    gate.set()
    engine.run()
    engine.assert_clean()
