"""KV events of the pool: each block once, only after it is true, and saying exactly what vLLM's own events say of the block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvpool.engine import kv_events, sweep
from kvpool.stores.base import Result, Status
from tests.contract.fakestore import GONE, FakeStore

PROMPT = list(range(100, 200))  # 6 full blocks and 4 tokens
HYBRID = (("full", 0), ("sliding", 24))
SHAPES = {
    "plain": {},
    "chunked": {"max_tokens_per_step": 24},
    "hybrid": {"groups": HYBRID},
    "half-units": {"groups": HYBRID, "hash_block_size": 8},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "async": {"load_async": True},
}


@pytest.fixture(autouse=True)
def raw_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def ours(engine, kind=BlockStored) -> list:
    return [e for e in engine.events if isinstance(e, kind) and e.medium != "GPU"]


def hashes(events) -> list[bytes]:
    return [h for event in events for h in event.block_hashes]


def by_vllm(engine) -> dict[tuple[int, bytes], tuple]:
    """(group, hash) -> parent, tokens, extra keys, adapter, of vLLM's own events, block by block."""
    found = {}
    for event in engine.events:
        if not isinstance(event, BlockStored) or event.medium != "GPU":
            continue
        parent, size = event.parent_block_hash, event.block_size
        for i, name in enumerate(event.block_hashes):
            extra = event.extra_keys[i] if event.extra_keys else None
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            found[event.group_idx, name] = (parent, tokens, extra, event.lora_name, event.kv_cache_spec_kind, size)
            parent = name
    return found


def described(event: BlockStored) -> tuple:
    extra = event.extra_keys[0] if event.extra_keys else None
    return (event.parent_block_hash, tuple(event.token_ids), extra, event.lora_name, event.kv_cache_spec_kind, event.block_size)


def readable(engine, event: BlockStored) -> bool:
    """Whether every shard of the block lies in the store."""
    shards = {shard for rank in engine.ranks for group, shard in rank.shards() if group == event.group_idx}
    names = [key.decode().split(":") for key in engine.store.objects]
    there = {(int(group), shard, text) for _, _, group, shard, text in names}
    return all((event.group_idx, shard, event.block_hashes[0].hex()) in there for shard in shards)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_event_says_what_vllm_says_of_the_block_and_is_true(start, shape):
    engine = start(kv_events=True, **SHAPES[shape])
    engine.ask("a", PROMPT[:70], 4)
    engine.ask("b", [*PROMPT, *range(300, 340)], 4)  # extends the prefix
    engine.ask("c", [*PROMPT[:40], *range(400, 460)], 4, salt="salted")
    engine.ask("d", PROMPT, 4, lora="one")
    engine.settle()
    told, right = ours(engine), by_vllm(engine)
    assert len(told) >= 20
    assert len({(e.group_idx, e.block_hashes[0]) for e in told}) == len(told), "one event a block, and each block once"
    for event in told:
        assert len(event.block_hashes) == 1
        assert readable(engine, event)
        assert described(event) == right[event.group_idx, event.block_hashes[0]]
        assert (event.medium, event.locality) == ("STORAGE", "REMOTE"), "the fake store claims to reach every host"
    assert {e.group_idx for e in told} == set(range(len(engine.spec.groups)))
    engine.assert_clean()


def test_hashes_are_numbers_where_vllms_are(start, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    engine = start(kv_events=True)
    engine.ask("a", PROMPT)
    engine.settle()
    assert {(0, h) for h in hashes(ours(engine))} == set(by_vllm(engine))
    assert all(isinstance(h, int) for h in hashes(ours(engine)))


def parents_of(engine, name: str) -> dict[bytes, bytes | None]:
    chain = engine.requests[name].block_hashes
    return {h: chain[i - 1] if i else None for i, h in enumerate(chain)}


def test_bc_183_parents_are_those_of_the_prefix_where_only_some_blocks_are_new(start):
    engine = start(kv_events=True, max_tokens_per_step=256)
    probe = engine.request("probe", PROMPT)
    some = {probe.block_hashes[i].hex().encode() for i in (1, 3)}
    engine.store.rules["put"] = lambda key: None if key.rsplit(b":", 1)[1] in some else Result(Status.NO_SPACE)
    engine.ask("a", PROMPT)
    engine.settle()
    chain = engine.requests["a"].block_hashes
    assert hashes(ours(engine)) == [chain[1], chain[3]], "blocks that were not stored are not told"
    engine.events.clear()
    engine.store.rules.clear()
    engine.ask("b", PROMPT)
    engine.settle()
    told = ours(engine)
    assert hashes(told) == [chain[i] for i in (0, 2, 4, 5)]
    assert {e.block_hashes[0]: e.parent_block_hash for e in told} == {h: parents_of(engine, "b")[h] for h in hashes(told)}
    engine.assert_clean()


@pytest.mark.parametrize("status", [Status.TRANSIENT, Status.NO_SPACE, Status.FATAL, Status.BUSY])
def test_bc_183_failed_saves_tell_nothing(start, status):
    engine = start(kv_events=True)
    engine.store.fail_keys("put", lambda key: True, Result(status))
    engine.ask("a", PROMPT)
    engine.settle()
    assert not ours(engine)
    assert by_vllm(engine), "vLLM has told of its own"
    engine.assert_clean()


def test_bc_183_nothing_is_told_before_it_is_readable(start):
    engine = start(kv_events=True, max_tokens_per_step=256)
    gate = engine.store.close_gate("put")
    engine.add("a", PROMPT)
    for _ in range(4):
        engine.step()
    assert not ours(engine)
    gate.set()
    engine.settle()
    assert len(ours(engine)) == 6
    engine.assert_clean()


def test_a_block_that_one_rank_could_not_store_is_not_told(start):
    engine = start(kv_events=True, tp=2)
    chain = engine.request("probe", PROMPT).block_hashes
    bad = chain[2].hex().encode()
    engine.store.fail_keys("put", lambda key: key.endswith(bad) and b":h1-1_" in key, Result(Status.NO_SPACE))
    engine.ask("a", PROMPT)
    engine.settle()
    assert hashes(ours(engine)) == [h for i, h in enumerate(chain[:6]) if i != 2]
    engine.assert_clean()


def test_what_was_stored_before_is_told_by_whoever_meets_it(start):
    """By another engine: offered and known, or loaded."""
    store = FakeStore()
    first = start(store, kv_events=True)
    first.ask("a", PROMPT)
    first.settle()
    second = start(store, kv_events=True, load_async=True, policy="recompute")
    second.ask("b", PROMPT)
    second.settle()
    assert second.external["b"] == 96
    assert hashes(ours(second)) == hashes(ours(first))
    consumer = start(store, kv_events=True, options={"min_hit_tokens": 1000})
    consumer.ask("c", PROMPT)
    consumer.settle()
    assert consumer.external["c"] == 0
    assert hashes(ours(consumer)) == hashes(ours(first)), "it computed and offered them, and the store knew them"


def test_a_load_that_finds_a_block_gone_tells_so(start):
    engine = start(FakeStore(leases=False), kv_events=True, load_async=True, policy="recompute")
    engine.ask("a", PROMPT)
    engine.settle()
    chain = engine.requests["a"].block_hashes
    bad = chain[3].hex().encode()
    engine.blocks.reset_prefix_cache()  # not through the manager: nothing is told of it
    engine.store.fail_keys("get", lambda key: key.endswith(bad), GONE)
    engine.store.fail_keys("put", lambda key: True, Result(Status.NO_SPACE))
    engine.ask("b", PROMPT)
    engine.settle()
    assert hashes(ours(engine, BlockRemoved)) == [chain[3]]
    assert hashes(ours(engine)) == chain[:6], "and none of the others a second time"
    engine.assert_clean()


def test_a_load_that_fails_otherwise_says_nothing_of_what_is_there(start):
    engine = start(kv_events=True, load_async=True, policy="recompute")
    engine.ask("a", PROMPT)
    engine.settle()
    engine.blocks.reset_prefix_cache()
    engine.store.fail_keys("get", lambda key: True, Result(Status.TRANSIENT))
    engine.ask("b", PROMPT)
    engine.settle()
    assert not ours(engine, BlockRemoved)


def test_a_reset_of_both_caches_is_one_event_of_vllm(start):
    engine = start(kv_events=True)
    engine.ask("a", PROMPT)
    engine.settle()
    engine.events.clear()
    assert engine.new_weights()
    engine.ask("b", PROMPT)
    engine.settle()
    cleared = [i for i, e in enumerate(engine.events) if isinstance(e, AllBlocksCleared)]
    assert cleared == [0], "before all that was stored afterwards"
    assert not ours(engine, BlockRemoved)
    assert len(ours(engine)) == 6, "told again, in the new namespace"


def test_a_reset_while_requests_run_removes_what_was_told(start):
    engine = start(kv_events=True)
    engine.ask("a", PROMPT)
    engine.settle()
    engine.add("running", [t + 500 for t in PROMPT], 20)
    engine.step()
    engine.step()
    before = set(hashes(ours(engine)))
    engine.events.clear()
    assert not engine.new_weights()
    engine.run()
    engine.settle()
    assert not any(isinstance(e, AllBlocksCleared) for e in engine.events)
    assert set(hashes(ours(engine, BlockRemoved))) >= before - set(hashes(ours(engine)))
    assert before
    running = set(engine.requests["running"].block_hashes)
    assert not running & set(hashes(ours(engine))), "KV of before the reset is not stored, nor told"


def test_a_reset_of_vllms_own_cache_lets_the_pool_be_told_again(start):
    """Subscribers have forgotten all of this engine: what is loaded or offered next is told again."""
    engine = start(kv_events=True)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.events.clear()
    engine.ask("b", PROMPT)
    engine.settle()
    assert engine.external["b"] == 96
    assert len(ours(engine)) == 6


@pytest.fixture
def swept(start, monkeypatch):
    """An engine whose store is mapped, so that the sweep looks; as often as it can."""
    monkeypatch.setattr(sweep, "EVERY_S", 0.0)
    store = FakeStore()
    store.capabilities = replace(store.capabilities, mapped=True)
    engine = start(store, kv_events=True)
    engine.ask("a", PROMPT)
    engine.settle()
    assert len(ours(engine)) == 6
    return engine


def step_until(engine, true) -> None:
    """The engine steps for some other request."""
    engine.add("other", list(range(900, 920)), 10_000)
    engine.until(true, step=True)
    engine.abort("other")


def test_bc_183_what_other_processes_evict_is_found_by_the_sweep(swept):
    chain = swept.requests["a"].block_hashes
    tails = {h.hex().encode() for h in chain[4:6]}
    swept.store.evict([key for key in swept.store.objects if key.rsplit(b":", 1)[1] in tails])
    step_until(swept, lambda: ours(swept, BlockRemoved))
    assert sorted(hashes(ours(swept, BlockRemoved))) == sorted(chain[4:6])
    swept.settle()


def test_the_sweep_believes_only_a_clear_no(swept):
    asked = len(swept.store.asked["exists"])
    swept.store.fail_keys("exists", lambda key: True, Result(Status.TRANSIENT))
    step_until(swept, lambda: len(swept.store.asked["exists"]) > asked + 30)
    assert not ours(swept, BlockRemoved)


def test_a_look_that_is_older_than_the_last_save_does_not_count():
    from kvpool.core.jobs import JobPart, SaveJob
    from kvpool.engine.agreement import Space

    events = kv_events.KvEvents([kv_events.EventGroup(16, 1, "full_attention", None)], local=True)
    space = Space("ns", ((),))

    class Asked:
        block_hashes, all_token_ids, lora_request, session_id = [b"h"], list(range(16)), None, None
        mm_features, cache_salt, prompt_embeds = [], None, None
        num_tokens = 16

    def save(job_id: int) -> None:
        events.note(SaveJob(job_id, "r", [JobPart(0, [0], [b"h"], [1])], 1.0, "ns"), Asked(), space)
        events.stored(job_id)

    save(1)
    look = events.oldest(10)
    save(2)
    events.gone(look)
    assert [type(e) for e in events.take()] == [BlockStored]
    events.gone(events.oldest(10))
    events.gone(look)
    assert [type(e) for e in events.take()] == [BlockRemoved], "and once"


def test_nobody_asked_for_events(start):
    engine = start()
    engine.ask("a", PROMPT)
    engine.settle()
    assert not engine.events
    assert engine.pool._books._events is None


@pytest.mark.parametrize("rival", ["first", "last"])
def test_as_a_child_of_a_multiconnector(start, rival):
    engine = start(kv_events=True, rival=rival)
    engine.ask("a", PROMPT)
    engine.settle()
    assert hashes(ours(engine)) == engine.requests["a"].block_hashes[:6]


def test_events_that_nobody_takes_are_bounded_and_counted(start, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_PENDING", 4)
    monkeypatch.setattr(kv_events, "MAX_TOLD", 3)
    engine = start(kv_events=True, max_tokens_per_step=256)
    counted = engine.count_metrics()
    engine.ask("a", PROMPT)
    engine.settle()
    engine.ask("b", [7])  # one more step: what the last one has counted
    chain = engine.requests["a"].block_hashes
    assert hashes(ours(engine)) == chain[2:6]
    assert (counted["kv_events/kind=stored"], counted["kv_events_dropped"]) == (4, 2)
    assert len(engine.pool._books._events._told) == 3


@pytest.mark.parametrize("shape", [{}, {"groups": HYBRID}], ids=["plain", "hybrid"])
def test_without_prefix_caching_of_the_engine_the_pool_tells_all_the_same(start, shape):
    engine = start(kv_events=True, prefix_caching=False, **shape)
    engine.ask("a", PROMPT)
    engine.settle()
    told = ours(engine)
    assert hashes(e for e in told if e.group_idx == 0) == list(engine.requests["a"].block_hashes[:6])
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask("b", PROMPT)
    engine.settle()
    assert len(ours(engine)) == 2 * len(told), "of the new namespace"
    engine.assert_clean()


@pytest.mark.parametrize("place", ["note", "stored", "removed", "oldest"])
def test_an_error_in_events_ends_events_and_not_the_engine(start, monkeypatch, place):
    """As a newer vLLM's might."""
    monkeypatch.setattr(sweep, "EVERY_S", 0.0)
    engine = start(kv_events=True)
    engine.pool._books._sweep._on = True

    def broken(*args, **more):
        raise TypeError(place)

    monkeypatch.setattr(engine.pool._books._events, place, broken)
    for i in range(3):
        engine.ask(f"a{i}", [t + 100 * i for t in PROMPT], 3)
    engine.settle()
    assert engine.pool._books._events is None
    assert engine.pool.take_events() == []
    engine.assert_clean()
