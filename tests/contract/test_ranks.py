"""Several ranks: one set of keys for lookup and save, every shard loaded by its rank, every block stored exactly once."""

from __future__ import annotations

import pytest

from kvpool.stores.base import MISS, Hit
from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore

PROMPT = list(range(100, 165))  # 4 full blocks and one token

SHAPES = {
    "tp2": {"tp": 2},
    "tp2-one-head": {"tp": 2, "heads": 1},
    "tp4-two-heads": {"tp": 4, "heads": 2},
    "tp2-four-heads": {"tp": 2, "heads": 4},
    "pp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-hybrid": {"tp": 2, "groups": (("full", 0), ("sliding", 24))},
}
shapes = pytest.mark.parametrize("shape", SHAPES)


@shapes
@pytest.mark.parametrize("load_async", [False, True])
def test_bc_015_bc_023_what_is_put_is_what_is_asked_for_and_got(start, shape, load_async):
    engine = start(load_async=load_async, **SHAPES[shape])
    engine.ask("a", PROMPT)
    engine.forget_local()
    put = engine.store.asked["put"]
    assert len(set(put)) == len(put), "every object is put once, whoever holds it"
    engine.store.asked["exists"].clear()
    engine.ask("b", PROMPT, 3)
    assert engine.external["b"] == 64
    asked, got = set(engine.store.asked["exists"]), engine.store.asked["get"]
    assert set(got) <= asked <= set(put)
    if "hybrid" not in shape:
        assert asked == set(put)
    for rank in engine.ranks:
        mine = {shard for _, shard in rank.shards()}
        assert mine <= {key.decode().split(":")[3] for key in got}, "every rank loads its own shard"
    engine.assert_clean()


def test_bc_015_shared_heads_have_one_key_a_block(start):
    engine = start(tp=2, heads=1)
    engine.ask("a", PROMPT)
    engine.settle()
    assert len(engine.store.objects) == 4


@pytest.mark.parametrize("shape", ["tp2-one-head", "tp4-two-heads"])
def test_bc_023_replicas_load_by_themselves(start, shape):
    engine = start(**SHAPES[shape])
    engine.ask("a", PROMPT)
    engine.forget_local()
    got = {i: [] for i in range(engine.spec.ranks)}
    for i, rank in enumerate(engine.ranks):
        rank.memory[:] = -1
        transfers = rank.worker_side._transfers
        load = transfers.load
        transfers.load = lambda job, i=i, load=load: got[i].append(job.job_id) or load(job)
    engine.ask("b", PROMPT, 3)
    assert {len(jobs) for jobs in got.values()} == {1}, "one load call a rank"
    engine.assert_clean()


def test_bc_024_who_stores_a_shared_block_does_not_depend_on_answers(start):
    """Ranks that are told different things of what is there still store every block exactly once."""
    prompt = list(range(100, 261))
    engine = start(tp=4, heads=1, max_tokens_per_step=512)
    told = []
    real = engine.store.exists

    def exists(keys):
        told.append(len(keys))
        return [MISS if len(told) % 2 else answer for answer in real(keys)]

    engine.store.exists = exists
    puts_of = {}
    for i, rank in enumerate(engine.ranks):
        transfers = rank.worker_side._transfers
        pieces = transfers._pieces

        def watched(job, loading, i=i, pieces=pieces):
            found = pieces(job, loading)
            if not loading:
                puts_of.setdefault(i, []).extend(key for piece in found for key in piece.batch.keys)
            return found

        transfers._pieces = watched
    engine.ask("a", prompt)
    engine.settle()
    put = [key for keys in puts_of.values() for key in keys]
    assert sorted(put) == sorted(set(put))
    assert len(put) == 10
    assert {i: len(keys) for i, keys in puts_of.items()} == {0: 3, 1: 3, 2: 2, 3: 2}, "round robin by position"
    engine.assert_clean()


@shapes
def test_bc_019_a_block_counts_only_where_every_shard_of_it_is_there(start, shape):
    prompt = list(range(100, 197))
    engine = start(**SHAPES[shape])
    engine.ask("a", prompt)
    engine.forget_local()
    hash_of_3 = engine.requests["a"].block_hashes[3].hex().encode()
    lost = sorted(key for key in engine.store.objects if key.endswith(hash_of_3))[-1]
    if "hybrid" in shape:
        lost = next(key for key in sorted(engine.store.objects) if key.endswith(hash_of_3) and b":0:h1" in key)
    kept = engine.store.objects.pop(lost)
    engine.ask("b", prompt, 2)
    engine.settle()
    assert engine.external["b"] == 48
    later = {h.hex().encode() for h in engine.requests["a"].block_hashes[3:]}
    assert not [key for key in engine.store.asked["get"] if key.rsplit(b":", 1)[1] in later]
    assert lost in engine.store.objects, "it is stored again"
    assert engine.store.objects[lost] == kept
    engine.forget_local()
    engine.ask("c", prompt)
    assert engine.external["c"] == 96
    engine.assert_clean()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("shape", ["tp2", "pp2", "tp2-pp2", "tp2-hybrid"])
def test_a_load_that_fails_on_one_rank_fails_on_all_and_spoils_nothing(start, shape, policy, load_async):
    """What one rank failed to load spoils the layers that every rank computes after it: nothing of that step may be stored."""
    engine = start(policy=policy, load_async=load_async, **SHAPES[shape])
    engine.ask("a", PROMPT)
    engine.forget_local()
    shard = str(sorted({key.split(b":")[3] for key in engine.store.objects})[-1])[2:-1].encode()
    engine.store.fail_keys("get", lambda key: shard in key)
    longer = PROMPT + list(range(300, 360))
    engine.add("c", [7] * 70, 2)
    engine.add("b", longer, 2)
    engine.run()
    assert engine.answers["b"].tokens == (expected_output(longer, 2) if policy == "recompute" else [])
    engine.assert_clean()


def test_bc_103_ranks_that_store_nothing_keep_nothing(start):
    """Many hits; with one head and one stored block, rank 1 never has anything to put."""
    engine = start(tp=2, heads=1, prefix_caching=False)
    prompt = list(range(100, 117))
    engine.ask("a", prompt)
    engine.store.log = False
    for i in range(300):
        engine.ask(f"b{i}", prompt)
    engine.assert_clean()
    assert engine.external["b299"] == 16


def test_bc_016_engines_of_unequal_tp_share_nothing_wrong(start):
    store = FakeStore()
    four, two = start(store, tp=4, heads=4), start(store, tp=2, heads=4)
    four.shares_store = two.shares_store = True
    for name, writer, reader in (("x", four, two), ("y", two, four)):
        prompt = [ord(name) + t for t in PROMPT]
        writer.ask(f"{name}-w", prompt)
        writer.settle()
        assert reader.ask(f"{name}-r", prompt, 3) == expected_output(prompt, 3)
        assert reader.external[f"{name}-r"] == 0


@pytest.mark.parametrize("heads", [1, 2])
def test_bc_017_engines_with_the_same_shards_share_whatever_their_tp(start, heads):
    """More ranks than heads: the shards of TP 4 and TP 8 are the same."""
    store = FakeStore()
    one, other = start(store, tp=4, heads=heads), start(store, tp=8, heads=heads)
    one.ask("w", PROMPT)
    one.settle()
    other.shares_store = True
    assert other.ask("r", PROMPT, 3) == expected_output(PROMPT, 3)
    assert other.external["r"] == 64
    one.assert_clean()
    other.assert_clean()


def test_two_engines_share_one_pool_at_once(start):
    store = FakeStore()
    engines = [start(store, load_async=True), start(store), start(store, prefix_caching=False)]
    for engine in engines:
        engine.shares_store = True
    for i in range(30):
        prompt = PROMPT[: 20 + 16 * (i % 3)] + [i % 4] * 20
        for j, engine in enumerate(engines):
            engine.add(f"r{i}-{j}", prompt, 3)
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.run()
    for engine in engines:
        engine.assert_clean()
    assert sum(tokens > 0 for engine in engines for tokens in engine.external.values()) > 10
    assert all(isinstance(answer, Hit) for answer in store.exists(list(store.objects)))
