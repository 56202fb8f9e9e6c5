"""Work grows with what is missing, never with what is there: counted, not timed."""

from __future__ import annotations

from types import SimpleNamespace

from kvpool.core.hits import GroupSpec
from kvpool.core.keys import block_keys
from kvpool.engine.requests import RequestState
from kvpool.engine.saving import SaveOffers

BIG = {"num_blocks": 1300, "max_tokens_per_step": 4096}


class Counted(list):
    """``looked`` is how many elements were looked at."""

    looked = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.looked += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        for one in super().__iter__():
            self.looked += 1
            yield one


def numbers(count: int, first: int = 0) -> list[int]:
    return [(first + i * 7) % 1900 for i in range(count)]


def test_bc_165_only_what_the_engine_lacks_is_asked_for(start):
    engine = start(**BIG)
    prompt = numbers(1024 * 16 + 1)
    engine.ask("warm", prompt[: 920 * 16 + 1])
    engine.settle()
    engine.store.asked["exists"].clear()
    engine.store.asked["lease"].clear()
    engine.ask("b", prompt)
    assert len(engine.store.asked["exists"]) <= 104
    assert engine.store.asked["lease"] == []
    engine.assert_clean()


def test_bc_166_a_hit_is_neither_asked_for_nor_put_again(start):
    engine = start(**BIG)
    prompt = numbers(512 * 16 + 1)
    engine.ask("warm", prompt[: 500 * 16 + 1])
    engine.forget_local()
    for keys in engine.store.asked.values():
        keys.clear()
    engine.scheduler.max_num_scheduled_tokens = 48  # the 12 new blocks come in 4 chunks and a rest
    engine.ask("b", prompt)
    engine.settle()
    assert engine.external["b"] == 500 * 16
    assert len(engine.store.asked["exists"]) <= 512, "one question per block, by the lookup"
    assert len(engine.store.asked["put"]) == 12
    assert len(set(engine.store.asked["put"])) == 12
    engine.assert_clean()


def test_bc_166_steps_that_fill_no_block_do_not_copy_block_tables(start, monkeypatch):
    engine = start()
    engine.add("a", numbers(33), 40)
    while not engine.answers["a"].tokens:
        engine.step()
    copies = []
    plan = engine.pool.plan_step

    def watched(output):
        resolve = output.kv_connector_block_state.resolve_block_ids
        output.kv_connector_block_state.resolve_block_ids = lambda name: copies.append(name) or resolve(name)
        return plan(output)

    monkeypatch.setattr(engine.pool, "plan_step", watched)
    engine.run()
    assert not copies, "decoding is not saved: its steps need no table"
    engine.ask("b", numbers(33, 5))
    assert copies, "a step that fills blocks needs it"


def test_bc_082_only_what_is_missing_is_put_in_the_end(start):
    engine = start(prefix_caching=False, max_tokens_per_step=512)
    prompt = numbers(161)
    engine.ask("a", prompt)
    engine.settle()
    keys = {key.rsplit(b":", 1)[1]: key for key in engine.store.objects}
    names = [keys[h.hex().encode()] for h in engine.requests["a"].block_hashes]
    assert len(names) == 10
    engine.store.evict([names[4], names[7]])
    before = dict(engine.store.objects)
    engine.ask("b", prompt)
    engine.settle()
    assert engine.external["b"] == 64
    assert set(engine.store.objects) - set(before) == {names[4], names[7]}
    engine.assert_clean()


def test_bc_170_keys_of_a_long_prompt_are_made_once():
    """62 chunks of a million tokens: what all chunks together name is each block once, and none is looked at again and again."""
    blocks = 7813
    hashes, table = Counted(i.to_bytes(32, "big") for i in range(blocks)), Counted(range(1, blocks + 1))
    request = SimpleNamespace(request_id="r", block_hashes=hashes, num_prompt_tokens=blocks * 128, num_tokens=blocks * 128)
    offers, state = SaveOffers([GroupSpec(128, 1)], save_decode=False), RequestState(request)
    named = 0
    for chunk in range(0, blocks * 128, 16384):
        parts, _ = offers.offer(state, chunk, min(chunk + 16384, blocks * 128), [table], 1 << 20)
        named += sum(len(block_keys(b"prefix:", part.hashes)) for part in parts)
    assert named == blocks
    assert blocks <= hashes.looked <= 2 * blocks
    assert blocks <= table.looked <= 2 * blocks


def test_bc_165_the_cost_of_a_step_does_not_grow_with_the_context():
    """A decode step of a request with 100,000 blocks looks at none of them."""
    blocks = 100_000
    hashes = Counted([b""] * blocks)
    request = SimpleNamespace(request_id="r", block_hashes=hashes, num_prompt_tokens=blocks * 16)
    offers, state = SaveOffers([GroupSpec(16, 1)], save_decode=True), RequestState(request)
    state.offered = [blocks]
    for _ in range(100):
        assert not offers.due(state, blocks * 16 + 1, blocks * 16 + 2, room=100)
    assert hashes.looked == 0
