"""Reset of the cache: after new weights, nothing of before may be stored under what is read after."""

from __future__ import annotations

import pytest

from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore
from tests.contract.fuzz import Chances, Fuzz
from tests.contract.harness import Harness, OracleError
from tests.contract.spec import Spec

PROMPT = list(range(100, 200))
MODES = {"sync": {}, "async": {"load_async": True}, "hybrid": {"groups": (("full", 0), ("sliding", 24))}, "tp2": {"tp": 2}}
modes = pytest.mark.parametrize("mode", MODES)


def namespaces(engine) -> set[bytes]:
    return {key.split(b":")[1] for key in engine.store.objects if not key.startswith(b"v1:note")}


@modes
def test_bc_185_a_reset_starts_an_empty_namespace(start, mode):
    engine = start(**MODES[mode])
    engine.ask("a", PROMPT)
    engine.settle()
    assert engine.new_weights()
    assert engine.ask("b", PROMPT, 2) == expected_output(PROMPT, 2)
    assert engine.external["b"] == 0
    engine.forget_local()
    assert engine.ask("c", PROMPT, 2) == expected_output(PROMPT, 2)
    assert engine.external["c"] == 96, "the new namespace fills and hits"
    engine.assert_clean()


def test_bc_185_control_without_a_new_namespace_old_kv_is_served(start, monkeypatch):
    engine = start()
    engine.ask("a", PROMPT)
    engine.settle()
    monkeypatch.setattr(type(engine.pool), "reset", lambda self: True)
    engine.new_weights()
    with pytest.raises(OracleError, match="read wrong KV"):
        engine.ask("b", PROMPT, 2)


@modes
def test_bc_185_saves_in_flight(start, mode):
    """The save was planned before the reset and reads after it: its object must not be found by anybody after."""
    engine = start(**MODES[mode])
    engine.store.hold.add("put")
    engine.add("a", PROMPT)
    engine.until(lambda: engine.store.held, step=True)
    engine.run()
    engine.new_weights()
    engine.store.hold.clear()
    engine.store.finish_held()
    assert engine.ask("b", PROMPT[:50], 2) == expected_output(PROMPT[:50], 2)
    assert engine.external["b"] == 0
    engine.assert_clean()


@modes
def test_bc_185_requests_that_live_on_never_store_what_they_hold(start, mode):
    engine = start(**MODES[mode], options={"save_decode_cache": True})
    engine.add("old", PROMPT[:60], 60)
    for _ in range(5):
        engine.step()
    assert engine.answers["old"].tokens
    engine.new_weights()
    assert "old" in engine.mixed
    old = {key.split(b":")[1] for key in engine.store.objects}
    engine.run()
    engine.ask("new", [t + 300 for t in PROMPT], 2)
    engine.assert_clean()
    fresh = [key for key in engine.store.objects if key.split(b":")[1] not in old]
    assert fresh, "new requests store again"


@pytest.mark.parametrize("groups", [(("full", 0),), (("full", 0), ("sliding", 24))], ids=["full", "hybrid"])
def test_bc_185_loads_in_flight(start, groups):
    engine = start(load_async=True, groups=groups)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.hold.add("get")
    engine.add("b", PROMPT, 3)
    engine.until(lambda: engine.store.held, step=True)
    engine.new_weights()
    engine.store.hold.clear()
    engine.until(lambda: not engine.store.finish_held() and engine.answers["b"].reason is not None, step=True)
    engine.forget_local()
    engine.local_stale = False
    assert engine.ask("c", PROMPT, 3) == expected_output(PROMPT, 3)
    engine.assert_clean()


def test_bc_185_lookups_in_flight(start):
    engine = start(options={"lookup_wait_ms": 0})
    engine.ask("a", PROMPT)
    engine.forget_local()
    gate = engine.store.close_gate("exists")
    engine.add("b", PROMPT, 3)
    engine.step()
    engine.step()
    gate.set()
    engine.until(lambda: engine.store.leased)
    engine.new_weights()
    engine.run()
    assert engine.answers["b"].tokens == expected_output(PROMPT, 3)
    assert engine.external["b"] == 0, "what the lookup found is of before the reset"
    engine.assert_clean()


def test_bc_185_waiting_requests_that_were_asked_for_before(start):
    engine = start(max_seqs=1)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.add("runs", [7] * 40, 20)
    engine.step()
    engine.add("waits", PROMPT, 3)
    engine.step()
    engine.new_weights()
    engine.run()
    assert engine.external["waits"] == 0
    engine.assert_clean()


@modes
def test_bc_185_running_requests_are_preempted_and_start_over(start, mode):
    engine = start(**MODES[mode])
    engine.add("a", PROMPT, 20)
    for _ in range(5):
        engine.step()
    engine.settle_jobs()
    engine.settle_reports()
    assert engine.new_weights(reset_running=True)
    engine.run()
    assert engine.answers["a"].tokens == expected_output(PROMPT, 20)
    engine.assert_clean()


def test_bc_185_another_engine_keeps_its_objects(start):
    store = FakeStore()
    one, other = start(store), start(store)
    one.shares_store = other.shares_store = True
    one.ask("a", PROMPT)
    one.settle()
    assert one.new_weights()
    assert other.ask("b", PROMPT, 2) == expected_output(PROMPT, 2)
    assert other.external["b"] in (0, 96)
    before = other.external["b"]
    one.ask("c", PROMPT)
    one.settle()
    other.forget_local()
    other.ask("d", PROMPT, 2)
    assert other.external["d"] == 96, "its own, stored again if need be"
    assert before == 96, "a reset of one engine does not take what others share"


def test_bc_185_two_resets_in_a_row(start):
    engine = start()
    for i in range(3):
        engine.ask(f"a{i}", PROMPT)
        engine.settle()
        assert engine.new_weights()
    engine.ask("b", PROMPT)
    assert engine.external["b"] == 0
    engine.assert_clean()


def test_bc_185_a_reset_before_the_first_request(start):
    engine = start()
    assert engine.new_weights()
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.ask("b", PROMPT)
    assert engine.external["b"] == 96
    engine.assert_clean()


def test_bc_185_a_store_that_cannot_clear_does_not_hold_up_the_reset(start, monkeypatch):
    engine = start()
    engine.ask("a", PROMPT)
    engine.settle()

    def clear(prefix):
        raise OSError("store is down")

    monkeypatch.setattr(engine.store, "clear", clear)
    engine.new_weights()
    assert engine.ask("b", PROMPT, 2) == expected_output(PROMPT, 2)
    assert engine.external["b"] == 0
    engine.assert_clean()


def test_bc_185_a_load_that_has_just_ended(start):
    """The request has its old KV but has not run since: it counts as holding it."""
    engine = start(load_async=True)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.add("b", [*PROMPT, *range(300, 350)], 3)
    engine.until(lambda: "b" in engine.scheduler.finished_recving_kv_req_ids, step=True)
    engine.new_weights()
    assert "b" in engine.mixed
    engine.run()
    engine.assert_clean()


def test_bc_185_a_request_that_hit_old_kv_stays_out_over_a_second_reset(start):
    engine = start(max_tokens_per_step=32)
    engine.add("old", PROMPT[:40], 60)
    engine.until(lambda: engine.answers["old"].tokens, step=True)
    engine.new_weights()
    engine.add("builds on it", [*PROMPT[:36], *range(300, 400)], 3)
    engine.step()
    assert "builds on it" in engine.mixed
    engine.new_weights()
    engine.run()
    engine.assert_clean()


def test_bc_185_a_preempted_request_stores_what_it_computes_anew(start):
    engine = start()
    engine.add("a", PROMPT, 20)
    engine.until(lambda: engine.answers["a"].tokens, step=True)
    engine.settle_reports()
    engine.new_weights(reset_running=True)
    engine.run()
    engine.assert_clean()
    fresh = [key for key in engine.store.objects if key.split(b":")[1].decode() == engine.pool._agreement.namespace]
    assert len(fresh) == 6


@pytest.mark.parametrize("part", range(4))
def test_bc_185_random_lives_with_resets(part):
    for seed in range(part * 10, part * 10 + 10):
        fields = {
            "num_blocks": 96,
            "options": {"breaker_cooldown_ms": 1, "negative_cache_ms": 20},
            **list(MODES.values())[seed % 4],
        }
        held = seed // 4 % 2 == 1
        engine = Harness(Spec(**fields), FakeStore(abandonable=not held))
        try:
            fuzz = Fuzz(engine, seed, Chances(preempt=0.1, new_weights=0.08, held=held))
            fuzz.run(40)
            fuzz.finish()
            engine.assert_clean()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            engine.close()
