"""Preemption: queued saves, lost stores, and blocks that somebody else owns by then."""

from __future__ import annotations

import pytest

from kvpool.engine.pins import BlockPins
from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore
from tests.contract.fuzz import Chances, Fuzz
from tests.contract.harness import Harness, OracleError
from tests.contract.spec import Spec

PROMPT = list(range(100, 197))  # 6 full blocks and one token
OTHER = [t + 800 for t in PROMPT]


def race(engine: Harness) -> None:
    """A's save is held at a gate while A is preempted and B writes wherever it is given room."""
    engine.store.hold.add("put")
    engine.add("a", PROMPT, 20)
    engine.until(lambda: engine.store.held, step=True)
    engine.preempt("a")
    engine.abort("a")
    engine.ask("b", OTHER)
    engine.store.hold.clear()
    engine.store.finish_held()


def test_bc_054_a_queued_save_never_stores_what_the_next_owner_wrote(start):
    engine = start(prefix_caching=False, num_blocks=16)
    race(engine)
    engine.assert_clean()
    stored = {key.rsplit(b":", 1)[1] for key in engine.store.objects}
    assert {h.hex().encode() for h in engine.requests["a"].block_hashes[:4]} <= stored


def test_bc_054_control_without_pins_the_race_is_lost(start, monkeypatch):
    monkeypatch.setattr(BlockPins, "pin", lambda self, job_id, block_ids, saving: None)
    engine = start(prefix_caching=False, num_blocks=16)
    race(engine)
    with pytest.raises(OracleError, match="wrong KV under"):
        engine.check_store()


def late_load(engine: Harness) -> None:
    """B's load is overdue and cannot be abandoned; B goes on without it, and the library writes much later."""
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.hold.add("get")
    engine.add("b", PROMPT, 3)
    engine.until(lambda: engine.store.held, step=True)
    engine.until(lambda: engine.answers["b"].reason is not None, step=True)
    engine.store.hold.clear()
    for i in range(4):  # others take all the room there is
        engine.add(f"c{i}", [t + 100 * i for t in OTHER], 3)
    engine.step()
    engine.store.finish_held()
    engine.run()


def overdue(start, policy: str) -> Harness:
    store = FakeStore(abandonable=False)
    return start(store, num_blocks=40, prefix_caching=False, policy=policy, options={"load_timeout_ms": 50})


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_bc_091_an_overdue_load_that_cannot_be_abandoned_keeps_its_blocks(start, policy):
    engine = overdue(start, policy)
    late_load(engine)
    assert engine.answers["b"].tokens == (expected_output(PROMPT, 3) if policy == "recompute" else [])
    engine.assert_clean()


def test_bc_091_control_without_pins_the_late_write_is_noticed(start, monkeypatch):
    monkeypatch.setattr(BlockPins, "pin", lambda self, job_id, block_ids, saving: None)
    engine = overdue(start, "recompute")
    with pytest.raises(OracleError, match="read wrong KV"):
        late_load(engine)


def test_bc_058_what_preemption_lost_is_stored_after_all(start, monkeypatch):
    monkeypatch.setattr("kvpool.engine.saving.RETRY_S", 0.0)
    engine = start(max_tokens_per_step=32, prefix_caching=False, num_blocks=32)
    engine.store.fail_keys("put", lambda key: True)
    engine.add("a", PROMPT, 2)
    engine.step()
    engine.step()
    engine.settle_jobs()
    engine.store.rules.clear()
    engine.preempt("a")
    engine.run()
    engine.assert_clean()
    stored = {key.rsplit(b":", 1)[1] for key in engine.store.objects}
    assert stored == {h.hex().encode() for h in engine.requests["a"].block_hashes[:6]}


def test_bc_058_what_was_stored_before_a_preemption_is_not_put_again(start):
    engine = start(max_tokens_per_step=32)
    engine.add("a", PROMPT, 2)
    engine.step()
    engine.step()
    engine.settle_jobs()
    stored = len(engine.store.objects)
    assert stored == 4
    engine.preempt("a")
    engine.store.asked["put"].clear()
    engine.run()
    engine.assert_clean()
    assert len(engine.store.objects) == 6
    assert len(engine.store.asked["put"]) == 2, "the first four are there, and locally hit or loaded"


@pytest.mark.parametrize("load_async", [False, True])
def test_a_preempted_request_finds_its_own_blocks_in_the_pool(start, load_async):
    engine = start(prefix_caching=False, load_async=load_async)
    engine.add("a", PROMPT, 10)
    while len(engine.answers["a"].tokens) < 3:
        engine.step()
    engine.settle_jobs()
    gets = engine.store.calls["get"]
    engine.preempt("a")
    engine.run()
    assert engine.answers["a"].tokens == expected_output(PROMPT, 10)
    assert engine.store.calls["get"] > gets
    engine.assert_clean()


def test_preemption_for_want_of_blocks_happens_and_is_survived(start):
    engine = start(num_blocks=20, prefix_caching=False)
    for i in range(6):
        engine.add(f"r{i}", [t + 50 * i for t in PROMPT[:60]], 60)
    engine.run()
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    for i in range(6):
        assert engine.answers[f"r{i}"].tokens == expected_output([t + 50 * i for t in PROMPT[:60]], 60)
    engine.assert_clean()


SHAPES = (
    {},
    {"load_async": True},
    {"policy": "recompute"},
    {"prefix_caching": False},
    {"prefix_caching": False, "load_async": True, "policy": "fail"},
    {"groups": (("full", 0), ("sliding", 24)), "num_blocks": 96},
    {"tp": 2},
    {"tp": 2, "load_async": True},
    {"pp": 2, "prefix_caching": False},
    {"policy": "recompute", "load_async": True, "options": {"load_timeout_ms": 5, "save_timeout_ms": 5, "lease_ms": 20}},
    {"drafts": 3, "options": {"save_decode_cache": True}},
)


@pytest.mark.parametrize("part", range(11))
def test_bc_059_two_hundred_random_schedules_free_what_they_allocate(part):
    """Every answer, read block and stored object is right on the way; at the end all blocks are free, with no reference left."""
    for seed in range(part * 20, part * 20 + 20):
        fields = {"num_blocks": 40, **SHAPES[seed % len(SHAPES)]}
        held = seed // len(SHAPES) % 2 == 1
        fields["options"] = {"breaker_cooldown_ms": 1, "negative_cache_ms": 20, **fields.get("options", {})}
        # A transfer that the test holds must not hold up a step, so held loads are of a store that cannot abandon them.
        engine = Harness(Spec(**fields), FakeStore(abandonable=not held))
        try:
            engine.accept = lambda name, seed=seed, engine=engine: (seed + engine.steps) % 4
            fuzz = Fuzz(engine, seed, Chances(abort=0.1, preempt=0.15, get=0.08, held=held))
            fuzz.run(40)
            fuzz.finish()
            engine.assert_clean()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            engine.close()
