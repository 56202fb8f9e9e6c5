"""Stores that fail, lie, hang or come back: requests end by policy, nothing hangs, nothing wrong is used."""

from __future__ import annotations

import random
import time

import pytest

from kvpool.core.breaker import BreakerState
from kvpool.stores.base import Done, Result, Status
from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore

PROMPT = list(range(100, 200))
HYBRID = (("full", 0), ("sliding", 24))
MODES = {
    "sync": {},
    "async": {"load_async": True},
    "hybrid": {"groups": HYBRID},
    "tp2": {"tp": 2},
    "tp2-async": {"tp": 2, "load_async": True},
}
modes = pytest.mark.parametrize("mode", MODES)
policies = pytest.mark.parametrize("policy", ["recompute", "fail"])


def warmed(start, store=None, **fields):
    engine = start(store, **fields)
    engine.ask("a", PROMPT)
    engine.forget_local()
    return engine


def ended_by_policy(engine, name: str, policy: str, count: int = 3) -> None:
    answer = engine.answers[name]
    if policy == "recompute":
        assert (answer.tokens, answer.reason) == (expected_output(PROMPT, count), "length")
    else:
        assert (answer.tokens, answer.reason) == ([], "error")


def key_of_block(engine, index: int) -> bytes:
    return engine.requests["a"].block_hashes[index].hex().encode()


@modes
@policies
@pytest.mark.parametrize("load_async", [False, True])
def test_bc_070_metadata_says_present_and_the_data_is_gone(start, mode, policy, load_async):
    engine = warmed(start, policy=policy, **{**MODES[mode], "load_async": load_async or "async" in mode})
    engine.store.fail_keys("get", lambda key: True)
    gets = engine.store.calls["get"]
    engine.add("other", [t + 700 for t in PROMPT], 3)
    engine.add("b", PROMPT, 3)
    engine.run()
    ended_by_policy(engine, "b", policy)
    assert engine.answers["other"].tokens == expected_output([t + 700 for t in PROMPT], 3)
    parts = len(engine.spec.groups) * engine.spec.ranks
    assert engine.store.calls["get"] - gets <= parts, "one load attempt"
    engine.assert_clean()


@pytest.mark.parametrize("index", [0, 2, 5], ids=["first", "middle", "last"])
@modes
@policies
def test_bc_070_bc_077_one_block_fails(start, mode, policy, index):
    engine = warmed(start, policy=policy, **MODES[mode])
    name = key_of_block(engine, index)
    engine.store.fail_keys("get", lambda key: key.endswith(name))
    engine.add("b", PROMPT, 3)
    engine.run()
    ended_by_policy(engine, "b", policy)
    engine.store.rules.clear()
    engine.assert_clean()


@modes
def test_the_next_request_does_not_meet_the_same_bad_object(start, mode):
    engine = warmed(start, **MODES[mode])
    name = key_of_block(engine, 2)
    engine.store.fail_keys("get", lambda key: key.endswith(name))
    engine.ask("b", PROMPT)
    engine.forget_local()
    assert engine.ask("c", PROMPT) == expected_output(PROMPT, 1)
    assert engine.external["c"] == 32, "up to the bad block"
    engine.assert_clean()


LIES = {
    "raises OSError": lambda batch: (_ for _ in ()).throw(OSError("gone")),
    "answers None": lambda batch: Done(None),
    "answers False": lambda batch: Done(False),
    "too few results": lambda batch: Done([Result(Status.OK, batch.object_nbytes)] * (len(batch.keys) - 1)),
    "no bytes": lambda batch: Done([Result(Status.OK, 0)] * len(batch.keys)),
    "too few bytes": lambda batch: Done([Result(Status.OK, batch.object_nbytes - 1)] * len(batch.keys)),
    "returns None": lambda batch: None,
}


@pytest.mark.parametrize("lie", LIES)
@modes
def test_bc_076_bc_077_bc_097_a_get_that_misbehaves_is_a_failed_load(start, monkeypatch, mode, lie):
    engine = warmed(start, **MODES[mode])
    monkeypatch.setattr(engine.store, "get", lambda batch, deadline_s: LIES[lie](batch))
    engine.add("b", PROMPT, 3)
    engine.run()
    ended_by_policy(engine, "b", "fail")
    monkeypatch.undo()
    engine.forget_local()
    engine.pool.negatives.clear()
    assert engine.ask("c", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["c"] == 96, "the worker lives and loads again"
    engine.assert_clean()


@pytest.mark.parametrize("lie", LIES)
def test_bc_076_a_put_that_misbehaves_stores_nothing_and_kills_nothing(start, monkeypatch, lie):
    engine = start()
    monkeypatch.setattr(engine.store, "put", lambda batch, deadline_s: LIES[lie](batch))
    assert engine.ask("a", PROMPT, 3) == expected_output(PROMPT, 3)
    engine.settle()
    assert not engine.store.objects
    monkeypatch.undo()
    engine.ask("b", PROMPT + [1] * 30)
    engine.assert_clean()
    assert engine.store.objects


def raise_error(keys):
    raise OSError("lookup failed")


@pytest.mark.parametrize("answer", ["raises", "None", "too long", "too short", "second call raises"])
@modes
def test_bc_074_a_lookup_that_fails_counts_for_nothing(start, monkeypatch, mode, answer):
    engine = warmed(start, **MODES[mode])
    real, calls = engine.store.exists, []

    def exists(keys):
        calls.append(keys)
        if answer == "raises" or (answer == "second call raises" and len(calls) > 1):
            raise OSError("lookup failed")
        return {"None": None, "too long": [*real(keys), real(keys)[0]], "too short": real(keys)[:-1]}.get(answer, real(keys))

    monkeypatch.setattr(engine.store, "exists", exists)
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert calls
    if answer != "second call raises":
        assert engine.external["b"] == 0
    monkeypatch.undo()
    engine.assert_clean()


def test_bc_074_what_was_proven_before_a_failing_batch_counts(start, monkeypatch):
    monkeypatch.setattr("kvpool.engine.lookup.PROBE_BLOCKS", 2)
    engine = warmed(start)
    real, calls = engine.store.exists, []

    def exists(keys):
        calls.append(keys)
        return raise_error(keys) if len(calls) == 2 else real(keys)

    monkeypatch.setattr(engine.store, "exists", exists)
    engine.ask("b", PROMPT)
    assert engine.external["b"] == 32
    engine.assert_clean()


@modes
def test_a_lease_call_that_raises_is_a_miss(start, monkeypatch, mode):
    engine = warmed(start, **MODES[mode])
    monkeypatch.setattr(engine.store, "lease", lambda keys, seconds: raise_error(keys))
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["b"] == 0
    engine.assert_clean()


@modes
@policies
def test_bc_084_a_lease_that_ends_before_the_transfer_does(start, mode, policy):
    engine = warmed(start, policy=policy, **MODES[mode])
    engine.store.fail_keys("get", lambda key: True, Result(Status.TRANSIENT, code=-707, text="lease expired"))
    engine.add("b", PROMPT, 3)
    engine.run()
    ended_by_policy(engine, "b", policy)
    engine.store.rules.clear()
    engine.assert_clean()


def test_bc_091_a_lookup_that_never_answers_delays_a_request_by_its_deadline_only(start):
    engine = warmed(start, options={"lookup_wait_ms": 0, "lookup_timeout_ms": 100})
    gate = engine.store.close_gate("exists")
    engine.add("other", [5] * 10, 5)
    engine.add("b", PROMPT, 3)
    engine.run(["other"])
    began = time.monotonic()
    engine.run(["b"])
    assert time.monotonic() - began < 30, "the gate opens after a minute"
    ended_by_policy(engine, "b", "recompute")
    assert engine.external["b"] == 0
    gate.set()
    engine.assert_clean()


@policies
@pytest.mark.parametrize("abandonable", [True, False])
@pytest.mark.parametrize("groups", [(("full", 0),), HYBRID], ids=["full", "hybrid"])
def test_bc_091_a_load_that_never_ends_is_failed_by_its_deadline(start, policy, abandonable, groups):
    store = FakeStore(abandonable=abandonable)
    engine = warmed(start, store, load_async=True, policy=policy, groups=groups, options={"load_timeout_ms": 100})
    engine.store.hold.add("get")
    engine.add("b", PROMPT, 3)
    engine.until(lambda: engine.store.held, step=True)
    engine.add("other", [5] * 10, 5)
    engine.run(["other"])
    engine.run(["b"])
    ended_by_policy(engine, "b", policy)
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.assert_clean()


def test_bc_065_failures_of_an_async_load_are_told_once_and_by_block(start):
    engine = warmed(start, load_async=True)
    side = engine.ranks[0].worker_side
    bad = {key_of_block(engine, 2), key_of_block(engine, 4)}
    engine.store.fail_keys("get", lambda key: key.rsplit(b":", 1)[1] in bad)
    told = []
    take = side.take_bad_blocks
    side.take_bad_blocks = lambda: told.append(blocks := take()) or blocks
    tables, allocated = [], engine.pool.allocated
    engine.pool.allocated = lambda request, blocks, n: tables.append(blocks.get_block_ids()[0]) or allocated(request, blocks, n)
    engine.add("b", PROMPT)
    engine.run()
    assert [blocks for blocks in told if blocks] == [{tables[0][2], tables[0][4]}]
    engine.assert_clean()


@modes
def test_the_breaker_opens_bypasses_the_store_and_recovers(start, mode):
    options = {"breaker_failures": 3, "breaker_cooldown_ms": 150}
    engine = warmed(start, options=options, **MODES[mode])
    for op in ("exists", "put"):
        engine.store.rules[op] = lambda key: Result(Status.FATAL)
    sick = [True]
    healthy = engine.store.health
    engine.store.health = lambda: healthy()._replace(ok=not sick[0])
    for i in range(8):
        assert engine.ask(f"b{i}", [t + 20 * i for t in PROMPT], 2) == expected_output([t + 20 * i for t in PROMPT], 2)
        engine.settle()
    assert engine.pool.breaker.state is not BreakerState.CLOSED or engine.pool._saves_down
    calls = engine.store.calls["exists"]
    engine.ask("bypassed", [t + 300 for t in PROMPT])
    assert engine.store.calls["exists"] <= calls + 1
    engine.store.rules.clear()
    sick[0] = False
    trigger = iter(range(1000))

    def recovered() -> bool:
        """Requests come meanwhile, as in life; whichever asks first is the probe."""
        number = next(trigger)
        engine.ask(f"p{number}", [t + 1000 + number for t in PROMPT[:40]])
        sides = [
            engine.pool.breaker,
            *(b for rank in engine.ranks for b in (rank.worker_side._load_breaker, rank.worker_side._save_breaker)),
        ]
        return all(breaker.state is BreakerState.CLOSED for breaker in sides) and not (
            engine.pool._workers_down or engine.pool._saves_down
        )

    engine.until(recovered, step=True)
    engine.store.objects.clear()
    engine.ask("again", PROMPT)
    engine.forget_local()
    engine.ask("hit", PROMPT)
    assert engine.external["hit"] == 96
    engine.assert_clean()


def test_bc_032_a_failed_load_of_a_hybrid_model_never_kills_the_engine(start):
    for policy in ("recompute", "fail"):
        engine = warmed(start, groups=HYBRID, policy=policy, load_async=False)
        engine.store.fail_keys("get", lambda key: b":1:" in key)
        engine.add("b", PROMPT, 3)
        engine.run()
        ended_by_policy(engine, "b", policy)
        engine.store.rules.clear()
        assert engine.ask("c", [9] * 40, 2) == expected_output([9] * 40, 2)
        engine.assert_clean()


@modes
def test_bc_071_fifty_requests_with_one_bad_block_each(start, mode):
    """Every output is the cold one, and as many failures are counted as were injected."""
    options = {"breaker_failures": 1_000_000, "negative_cache_ms": 1}
    engine = warmed(start, policy="recompute", options=options, **MODES[mode])
    chance, injected = random.Random(7), []
    counted = engine.count_metrics()
    for i in range(50):
        name = key_of_block(engine, chance.randrange(6))
        engine.store.fail_keys("get", lambda key, name=name: key.endswith(name) and (injected.append(key) or True))
        time.sleep(0.002)  # until what failed before is offered again
        assert engine.ask(f"b{i}", PROMPT, 3) == expected_output(PROMPT, 3)
        engine.store.rules.clear()
        engine.forget_local()
    assert len(injected) >= 50
    assert sum(v for k, v in counted.items() if k.startswith("load_failures")) == len(injected)
    engine.assert_clean()
