"""What is saved and when: chunks, decoding, drafts, gaps, dropped and refused saves."""

from __future__ import annotations

import pytest

from kvpool.stores.base import Result, Status
from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore

PROMPT = list(range(100, 200))  # 6 full blocks and 4 tokens


def names_of(engine, name: str, count: int) -> list[bytes]:
    return [h.hex().encode() for h in engine.requests[name].block_hashes[:count]]


def put_order(engine) -> list[bytes]:
    return [key.rsplit(b":", 1)[1] for key in engine.store.asked["put"]]


@pytest.mark.parametrize("load_async", [False, True])
def test_bc_048_every_chunk_of_a_prompt_is_stored_in_order(start, load_async):
    store = FakeStore()
    engine = start(store, max_tokens_per_step=32, load_async=load_async)
    engine.ask("a", PROMPT)
    engine.settle()
    assert put_order(engine) == names_of(engine, "a", 6)
    second = start(store, max_tokens_per_step=32, load_async=load_async)
    assert second.ask("b", PROMPT, 4) == expected_output(PROMPT, 4)
    assert second.external["b"] == 96
    engine.assert_clean()
    second.assert_clean()


def test_bc_049_the_step_that_fills_a_block_saves_it_with_the_id_it_has(start):
    """Steps 40->47, 47->48, 48->49: the block is filled by the second, and only the third gets new ids."""
    engine = start(options={"save_decode_cache": True})
    engine.add("a", PROMPT[:40], 12)
    saved = []
    transfers = engine.ranks[0].worker_side._transfers
    save = transfers.save
    transfers.save = lambda job: saved.append((engine.requests["a"].num_computed_tokens, job.parts[0].indexes)) or save(job)
    while engine.requests["a"].num_computed_tokens < 47:
        engine.step()
    engine.settle_jobs()
    assert [indexes for _, indexes in saved] == [[0, 1]]
    table = engine.scheduler.kv_cache_manager.get_block_ids("a")[0][:]
    engine.step()
    assert engine.requests["a"].num_computed_tokens == 48
    engine.settle_jobs()
    assert [indexes for _, indexes in saved] == [[0, 1], [2]]
    assert engine.scheduler.kv_cache_manager.get_block_ids("a")[0] == table, "the step brought no new block"
    engine.run()
    engine.assert_clean()
    assert put_order(engine) == names_of(engine, "a", 3), "each once"


def test_decoded_blocks_are_saved_only_where_asked_for(start):
    for wanted in (False, True):
        engine = start(options={"save_decode_cache": wanted})
        engine.ask("a", PROMPT[:30], 40)
        engine.assert_clean()
        assert len(engine.store.objects) == (4 if wanted else 1)


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_bc_036_bc_039_a_block_is_saved_only_when_its_tokens_are_accepted(start, accepted):
    engine = start(drafts=4, options={"save_decode_cache": True})
    engine.accept = lambda name: accepted
    for i, length in enumerate((30, 63, 64, 65)):
        prompt = [t + 100 * i for t in PROMPT[:length]]
        assert engine.ask(f"a{i}", prompt, 40) == expected_output(prompt, 40)
    engine.forget_local()
    engine.check_store()
    hits = engine.external
    for i, length in enumerate((30, 63, 64, 65)):
        prompt = [t + 100 * i for t in PROMPT[:length]]
        assert engine.ask(f"b{i}", prompt + expected_output(prompt, 30), 10)
        assert hits[f"b{i}"] == (length + 29) // 16 * 16
    engine.assert_clean()


def test_bc_039_changing_acceptance_over_block_ends(start):
    engine = start(drafts=3, options={"save_decode_cache": True})
    turns = iter(range(10**6))
    engine.accept = lambda name: next(turns) * 7 % 4
    for i in range(6):
        engine.add(f"a{i}", PROMPT[: 20 + i], 50)
    engine.run()
    engine.assert_clean()
    assert len(engine.store.objects) >= 6


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.TRANSIENT, Status.BUSY, Status.FATAL])
def test_what_was_refused_is_offered_again_by_the_next_request_that_holds_it(start, status):
    engine = start()
    engine.store.rules["put"] = lambda key: Result(status)
    engine.ask("a", PROMPT)
    engine.settle()
    assert not engine.store.objects
    engine.store.rules.clear()
    assert engine.ask("b", PROMPT) == expected_output(PROMPT, 1)  # a local hit
    engine.settle()
    assert len(engine.store.objects) == 6
    engine.store.asked["put"].clear()
    engine.ask("c", PROMPT)
    engine.assert_clean()
    assert engine.store.asked["put"] == []


def test_transient_puts_are_tried_once_more(start):
    engine = start()
    failed = set()
    engine.store.rules["put"] = lambda key: None if key in failed else (failed.add(key), Result(Status.TRANSIENT))[1]
    engine.ask("a", PROMPT)
    engine.assert_clean()
    assert len(engine.store.objects) == 6


def test_saves_beyond_the_pin_limit_are_dropped_counted_and_offered_again(start):
    engine = start(max_tokens_per_step=256, options={"max_pinned_save_percent": 5})  # 3 of 64 blocks
    engine.store.hold.add("put")
    engine.add("a", PROMPT, 3)
    engine.step()
    assert engine.pool.open_counts()["pinned"] == 3
    engine.run()
    assert engine.pool.open_counts()["pinned"] == 3, "the engine has not waited for room"
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.settle()
    assert len(engine.store.objects) == 3
    for i in range(3):
        engine.ask(f"b{i}", PROMPT)
        engine.settle()
    assert len(engine.store.objects) == 6
    engine.assert_clean()


def test_an_engine_without_requests_keeps_stepping_for_an_open_save(start):
    """Else it would hear of the save's end, and free the blocks, only with the next request."""
    engine = start()
    engine.store.hold.add("put")
    engine.ask("a", PROMPT)
    engine.until(lambda: engine.store.held, step=True)
    engine.step()  # what has finished is told to the workers here
    assert not engine.scheduler.has_unfinished_requests()
    assert not engine.scheduler.has_finished_requests()
    assert engine.pool.open_counts()["pinned"] == 6
    assert engine.scheduler.has_requests(), "as long as the save is open"
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.until(lambda: not engine.step())
    assert engine.pool.open_counts()["pinned"] == 0
    assert not engine.scheduler.has_requests()
    engine.assert_clean()


def test_a_full_store_costs_nothing_but_hits(start):
    engine = start(FakeStore(capacity=5 * 2048), prefix_caching=False)
    for i in range(6):
        prompt = [t + 30 * i for t in PROMPT]
        assert engine.ask(f"a{i}", prompt, 3) == expected_output(prompt, 3)
    engine.assert_clean()
    assert len(engine.store.objects) == 5


def test_bc_155_two_requests_of_one_step_with_a_common_prefix(start):
    engine = start(max_tokens_per_step=256, prefix_caching=False)
    engine.add("a", PROMPT, 2)
    engine.add("b", PROMPT[:80] + [1] * 20, 2)
    engine.run()
    engine.assert_clean()
    assert len(engine.store.objects) == 6 + 1


def test_bc_100_a_save_reads_what_the_forward_has_written(start):
    """Bytes appear when the step's event completes; until then a save must not look. The oracle compares every stored byte."""
    engine = start(prefix_caching=False)
    device = engine.ranks[0].worker_side._device
    waits = []

    class Late:
        def __init__(self, event) -> None:
            self.event, self.memory = event, engine.ranks[0].memory.copy()
            engine.ranks[0].memory[:] = -7  # not there yet

        def wait(self) -> None:
            waits.append(1)
            engine.ranks[0].memory[:] = self.memory
            self.event.wait()

    record = device.record
    engine.ranks[0].worker_side._device = type("Device", (), {"record": lambda self: Late(record())})()
    engine.add("a", PROMPT[:65], 1)
    engine.step()
    engine.settle_jobs()
    assert waits == [1], "one event a step"
    engine.ranks[0].worker_side._device = device
    engine.run()
    engine.assert_clean()
    assert len(engine.store.objects) == 4


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
@pytest.mark.parametrize("put", [False, True])
@pytest.mark.parametrize("load", [False, True])
def test_bc_088_roles_load_and_save_as_the_options_say(start, role, put, load):
    store = FakeStore()
    first = start(store)
    first.ask("a", PROMPT)
    first.settle()
    engine = start(
        store, role=role, options={"consumer_is_to_put": put, "consumer_is_to_load": load} if role == "kv_consumer" else {}
    )
    engine.shares_store = True
    loads, saves = role != "kv_consumer" or load, role != "kv_consumer" or put
    before = len(store.objects)
    assert engine.ask("b", PROMPT, 2) == expected_output(PROMPT, 2)
    assert engine.external["b"] == (96 if loads else 0)
    engine.ask("c", [t + 300 for t in PROMPT], 30)
    engine.assert_clean()
    assert (len(store.objects) > before) == saves
    decoded = len(store.objects) - before == 8
    assert decoded == (role == "kv_consumer" and put), "a consumer that stores, stores what it decodes"
