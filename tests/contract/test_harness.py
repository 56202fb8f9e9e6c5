"""The harness itself: it runs, it agrees with the pool, and it notices every kind of wrong KV."""

from __future__ import annotations

import pytest

from kvpool.engine.held import HeldSaves
from kvpool.engine.pins import BlockPins
from tests.contract.content import expected_output
from tests.contract.harness import OracleError

PROMPT = list(range(100, 200))  # 6 full blocks of 16 and 4 tokens

SHAPES = {
    "sync": {},
    "async": {"load_async": True},
    "no-prefix-caching": {"prefix_caching": False},
    "sliding": {"groups": (("full", 0), ("sliding", 24))},
    "chunked-local": {"groups": (("full", 0), ("chunked", 32))},
    "three-groups": {"groups": (("full", 0), ("sliding", 24), ("sliding", 24)), "num_blocks": 128},
    "half-units": {"groups": (("full", 0), ("sliding", 24)), "hash_block_size": 8},
    "tp2": {"tp": 2},
    "tp2-async": {"tp": 2, "load_async": True},
    "tp4-replicas": {"tp": 4},
    "mla": {"tp": 4, "heads": 1},
    "pp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "decode-saved": {"options": {"save_decode_cache": True}},
    "drafts": {"drafts": 3},
    "multi-first": {"rival": "last"},
    "multi-last": {"rival": "first"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_request_hits_and_answers_right(start, shape):
    engine = start(**SHAPES[shape])
    assert engine.ask("a", PROMPT, 8) == expected_output(PROMPT, 8)
    engine.forget_local()
    assert engine.store.objects
    assert engine.ask("b", PROMPT, 8) == expected_output(PROMPT, 8)
    assert engine.external["b"] == 96
    engine.assert_clean()


# ---- negative controls: each takes one protection away, and the oracle must notice --------------------------------------------


def warmed(start, **fields):
    engine = start(**fields)
    engine.ask("a", PROMPT)
    engine.forget_local()
    return engine


@pytest.mark.parametrize("load_async", [False, True])
def test_control_one_flipped_byte_in_the_pool_is_noticed(start, load_async):
    engine = warmed(start, load_async=load_async)
    key = sorted(engine.store.objects)[3]
    data = bytearray(engine.store.objects[key])
    data[-1] ^= 1
    engine.store.objects[key] = bytes(data)
    with pytest.raises(OracleError, match="wrong KV under"):
        engine.check_store()
    with pytest.raises(OracleError, match="read wrong KV"):
        engine.ask("b", PROMPT)


@pytest.mark.parametrize("shape", ["sync", "sliding", "tp2", "pp2"])
def test_control_one_flipped_word_in_kv_memory_is_noticed(start, shape):
    engine = start(**SHAPES[shape])
    engine.add("a", PROMPT, 4)
    while not engine.answers["a"].tokens:
        engine.step()
    table = engine.scheduler.kv_cache_manager.get_block_ids("a")[-1]
    engine.ranks[-1].memory[-1, table[5], -1, -1, -1] += 1
    with pytest.raises(OracleError, match="read wrong KV"):
        engine.run()


def test_control_a_failed_load_that_nobody_reports_is_noticed(start, monkeypatch):
    engine = warmed(start)
    monkeypatch.setattr(engine.ranks[0].worker_side, "take_bad_blocks", lambda: set())
    engine.store.fail_keys("get", lambda key: True)
    with pytest.raises(OracleError, match="read wrong KV"):
        engine.ask("b", PROMPT)


def test_control_saving_what_a_spoiled_step_computed_is_noticed(start, monkeypatch):
    engine = warmed(start)
    engine.store.fail_keys("get", lambda key: True)
    monkeypatch.setattr(HeldSaves, "hold", lambda self, job: self._waiting.append((job, set())))
    puts = engine.store.calls["put"]
    engine.during.append(lambda: engine.until(lambda: engine.store.calls["put"] > puts))
    engine.ask("b", PROMPT + list(range(300, 350)))
    with pytest.raises(OracleError, match="wrong KV under"):
        engine.check_store()


def test_control_a_late_write_into_blocks_that_nobody_pins_is_noticed(start, monkeypatch):
    monkeypatch.setattr(BlockPins, "pin", lambda self, job_id, block_ids, saving: None)
    engine = start(prefix_caching=False, num_blocks=8)
    engine.store.hold.add("put")
    engine.ask("a", PROMPT)
    engine.until(lambda: engine.store.held)
    engine.ask("b", [t + 500 for t in PROMPT])
    engine.store.finish_held()
    with pytest.raises(OracleError, match="wrong KV under"):
        engine.check_store()


def test_control_a_lease_that_is_never_released_is_noticed(start, monkeypatch):
    engine = warmed(start)
    monkeypatch.setattr(engine.pool._service, "release", lambda lease: None)
    engine.ask("b", PROMPT)
    with pytest.raises(AssertionError, match="leases"):
        engine.assert_clean(0.3)


def test_control_a_block_that_is_never_freed_is_noticed(start, monkeypatch):
    engine = start()
    monkeypatch.setattr(BlockPins, "unpin", lambda self, job_id: self._jobs.pop(job_id, None))
    engine.ask("a", PROMPT)
    with pytest.raises(AssertionError, match="blocks"):
        engine.assert_clean(0.3)
