"""The same engine on the embedded store, with the faults of a plan that can change while it runs."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from kvpool.engine.pins import BlockPins
from tests.contract.content import expected_output
from tests.contract.harness import OracleError
from tests.contract.realpool import RealPool

PROMPT = list(range(100, 200))
HYBRID = (("full", 0), ("sliding", 24))
SHAPES = {
    "sync": {},
    "recompute": {"policy": "recompute"},
    "async": {"load_async": True},
    "hybrid": {"groups": HYBRID},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "no-prefix-caching": {"prefix_caching": False},
}
shapes = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture
def pool(pool_root):
    pool = RealPool(pool_root)
    yield pool
    pool.faults()
    pool.close()


def start_on(start, pool, shape: str = "sync", **more):
    fields = {**SHAPES[shape], **more}
    return start(pool, **{**fields, "options": {**pool.options, **fields.get("options", {})}})


def ended_right(engine, name: str, prompt: list[int], count: int) -> None:
    answer = engine.answers[name]
    if engine.spec.policy == "recompute" or answer.reason != "error":
        assert answer.tokens == expected_output(prompt, count)
    else:
        assert answer.tokens == []


@shapes
def test_it_hits_and_answers_right(start, pool, shape):
    engine = start_on(start, pool, shape)
    assert engine.ask("a", PROMPT, 3) == expected_output(PROMPT, 3)
    engine.forget_local()
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["b"] == 96
    engine.assert_clean()
    assert pool.used() == (0, 0)


def test_two_engines_share_it(start, pool):
    one, other = start_on(start, pool), start_on(start, pool, "async")
    other.shares_store = True
    one.ask("a", PROMPT)
    one.settle()
    assert other.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert other.external["b"] == 96
    one.assert_clean()
    other.assert_clean()


FAULTS = {
    "get is refused": {"get": {"status": "missing", "every": 3}},
    "get fails": {"get": {"status": "transient"}},
    "get raises": {"get": {"error": "no"}},
    "get answers too few": {"get": {"result_change": -1}},
    "put fails": {"put": {"status": "fatal"}},
    "put loses": {"put": {"lose": True, "every": 2}},
    "full": {"put": {"full": True}},
    "exists raises": {"exists": {"error": "no"}},
    "exists does not know": {"exists": {"unknown": True, "every": 2}},
    "exists answers too few": {"exists": {"result_change": -1}},
    "lease raises": {"lease": {"error": "no"}},
    "lease finds less": {"lease": {"status": "missing", "every": 4}},
    "all at once": {"get": {"status": "transient", "fraction": 0.3}, "put": {"error": "no"}, "exists": {"delay_s": 0.02}},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", ["sync", "recompute", "hybrid", "tp2"])
def test_faults_cost_hits_and_nothing_else(start, pool, shape, fault):
    engine = start_on(start, pool, shape, options={"breaker_cooldown_ms": 20, "negative_cache_ms": 20})
    engine.ask("warm", PROMPT)
    engine.forget_local()
    pool.faults(**FAULTS[fault])
    for i in range(4):
        prompt = [*PROMPT, *range(300 + 50 * i, 340 + 50 * i)]
        engine.add(f"b{i}", prompt, 3)
        engine.run()
        ended_right(engine, f"b{i}", prompt, 3)
        engine.forget_local()
    pool.faults()
    engine.until(lambda: healthy(engine), step=True)
    engine.ask("later", [t + 700 for t in PROMPT])
    engine.forget_local()
    engine.ask("hits", [t + 700 for t in PROMPT])
    assert engine.external["hits"] == 96
    engine.assert_clean()


def healthy(engine) -> bool:
    engine.ask(f"probe{engine.steps}", PROMPT[:20])
    sides = [
        engine.pool.breaker,
        *(b for rank in engine.ranks for b in (rank.worker_side._load_breaker, rank.worker_side._save_breaker)),
    ]
    return all(int(breaker.state) == 0 for breaker in sides) and not (engine.pool._workers_down or engine.pool._saves_down)


def test_a_release_that_raises_leaves_a_lease_for_its_time_only(start, pool):
    engine = start_on(start, pool, options={"lease_ms": 3000, "load_timeout_ms": 1500})
    engine.ask("a", PROMPT)
    engine.forget_local()
    pool.faults(release={"error": "no"})
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert len(pool.leased) > 0
    pool.faults()
    engine.assert_clean()


def test_control_a_corrupted_object_is_noticed(start, pool):
    engine = start_on(start, pool)
    engine.ask("a", PROMPT)
    engine.forget_local()
    pool.faults(get={"corrupt": True})
    with pytest.raises(OracleError, match="read wrong KV"):
        engine.ask("b", PROMPT)


def late_writes(engine, pool) -> None:
    engine.ask("a", PROMPT)
    engine.forget_local()
    pool.faults(abandonable=False, get={"late_s": 1.0})
    engine.add("b", PROMPT, 3)
    engine.run()
    pool.faults(abandonable=False)
    for i in range(60):
        engine.add(f"c{i}", [t + 10 * i for t in PROMPT], 3)
        engine.step()
        time.sleep(0.03)
    engine.run()
    engine.settle()


def overdue(start, pool):
    pool.faults(abandonable=False)
    return start_on(start, pool, "recompute", num_blocks=40, prefix_caching=False, options={"load_timeout_ms": 60})


def test_bc_091_a_late_write_lands_in_pinned_blocks(start, pool):
    engine = overdue(start, pool)
    late_writes(engine, pool)
    engine.assert_clean()


def test_bc_091_control_without_pins_a_late_write_is_noticed(start, pool, monkeypatch):
    monkeypatch.setattr(BlockPins, "pin", lambda self, job_id, block_ids, saving: None)
    engine = overdue(start, pool)
    with pytest.raises(OracleError):
        late_writes(engine, pool)


def test_a_small_pool_evicts_and_nothing_goes_wrong(start, pool_root):
    pool = RealPool(pool_root, dram_bytes=1 << 20)
    chance = random.Random(1)
    engine = start_on(start, pool, "recompute", num_blocks=200, block_size=128, hash_block_size=128, max_tokens_per_step=512)
    trunks = [[chance.randrange(1800) for _ in range(700)] for _ in range(12)]
    for i in range(60):
        prompt = chance.choice(trunks)[: chance.choice((129, 300, 513, 650))]
        assert engine.ask(f"r{i}", prompt, 2) == expected_output(prompt, 2)
        if i % 5 == 0:
            engine.forget_local()
    assert any(engine.external.values())
    engine.assert_clean()
    pool.close()


def test_bc_185_reset(start, pool):
    engine = start_on(start, pool)
    engine.ask("a", PROMPT)
    engine.settle()
    assert engine.new_weights()
    engine.ask("b", PROMPT, 2)
    assert engine.external["b"] == 0
    engine.forget_local()
    engine.ask("c", PROMPT, 2)
    assert engine.external["c"] == 96
    engine.assert_clean()


def test_bc_109_both_sides_of_two_engines_in_one_process(start, pool):
    """No identity is made of the process id: each of the five users has its own, and none waits for another."""
    engines = [start_on(start, pool), start_on(start, pool)]
    assert pool.users() == 5, "two schedulers, two workers, the test's own view"
    for i, engine in enumerate(engines):
        engine.shares_store = True
        assert engine.ask(f"r{i}", PROMPT, 3) == expected_output(PROMPT, 3)
        engine.settle()
    assert engines[1].external["r1"] == 96
    for engine in engines:
        engine.assert_clean()


@pytest.mark.parametrize("shape", ["sync", "async"])
def test_loads_go_on_where_only_saves_fail(start, pool, pool_root, shape):
    """The files of the pool were deleted: what it holds can be read, and is."""
    engine = start_on(start, pool, shape, options={"breaker_failures": 2, "breaker_cooldown_ms": 20})
    engine.ask("a", PROMPT)
    engine.settle()
    shutil.rmtree(next(path for path in pool_root.iterdir() if path.is_dir()))
    for turn in range(4):
        engine.ask(f"new{turn}", list(range(300 + 100 * turn, 400 + 100 * turn)))
        engine.settle()
    assert engine.pool._saves_down
    for turn in range(3):
        engine.forget_local()
        assert engine.ask(f"b{turn}", PROMPT, 3) == expected_output(PROMPT, 3)
        assert engine.external[f"b{turn}"] == 96
        time.sleep(0.03)  # a probe, which finds it no better
    assert engine.pool._saves_down
    engine.assert_clean()
