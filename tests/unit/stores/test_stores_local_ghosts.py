"""The memory of evicted keys: a miss that tells evicted from never stored."""

import os
import random

import pytest
from tests.unit.stores.helpers import GRANULE, has, key, opened, put

from kvpool.stores.base import EVICTED, MISS, Hit
from kvpool.stores.local.geometry import geometry_for
from kvpool.stores.local.ghosts import WAYS, Ghosts, ghost_entries


@pytest.fixture
def table(tmp_path):
    ghosts = Ghosts(lambda name, flags: os.open(tmp_path / name, flags, 0o600), geometry_for(1 << 20))
    yield ghosts
    ghosts.close()


def test_what_was_evicted_is_told_from_what_never_was_there(pool_root):
    store = opened(pool_root, 4 * GRANULE)
    put(store, [key(i) for i in range(4)])
    put(store, [key("new")])  # evicts the tail
    assert store.exists([key(3)]) == [EVICTED]
    assert store.lease([key(3)], 1.0).answers == [EVICTED]
    assert store.exists([key("never")]) == store.lease([key("never")], 1.0).answers == [MISS]
    store.close()


def test_only_the_first_missing_key_of_a_call_is_told(pool_root):
    store = opened(pool_root, 4 * GRANULE)
    put(store, [key(i) for i in range(4)])
    put(store, [key("x"), key("y")])
    keys = [key(i) for i in range(4)]
    for answers in (store.exists(keys), store.lease(keys, 1.0).answers):
        assert [isinstance(answer, Hit) for answer in answers] == [True, True, False, False]
        assert answers[2:] == [EVICTED, MISS]
    store.close()


def test_other_processes_and_later_ones_see_it(pool_root):
    first, second = opened(pool_root, 4 * GRANULE), opened(pool_root, None)
    put(first, [key(i) for i in range(4)])
    put(first, [key("new")])
    assert second.exists([key(3)]) == [EVICTED]
    first.close()
    second.close()
    third = opened(pool_root, None)
    assert third.exists([key(3)]) == [EVICTED]
    third.close()


@pytest.mark.parametrize("end", ["remove", "remove while gone", "store again"])
def test_removing_or_storing_again_clears_the_ghost(pool_root, end):
    store = opened(pool_root, 4 * GRANULE)
    put(store, [key(i) for i in range(4)])
    put(store, [key("new")])
    if end != "remove while gone":
        put(store, [key(3)])
        assert has(store, [key(3)]) == [True]
    if end != "store again":
        store.remove([key(3)])
        assert store.exists([key(3)]) == [MISS]
    else:
        with store._entered() as pool:
            assert key(3) not in pool.ghosts
    store.close()


def test_the_table_is_bounded_and_forgets_the_oldest(table):
    entries = ghost_entries(geometry_for(1 << 20))
    keys = [key(i) for i in range(entries * 4)]
    for one in keys:
        table.add(one)
    remembered = [one in table for one in keys]
    assert sum(remembered) == entries
    assert sum(remembered[-entries // 4 :]) > 0.99 * entries // 4, "what was evicted last is remembered"
    assert not any(remembered[:entries])


def test_nothing_is_remembered_that_was_not_evicted(table):
    for i in range(2000):
        table.add(key(i))
    assert not any(key(f"other{i}") in table for i in range(20000))


def test_a_set_is_kept_in_order_whatever_happens_to_it(table):
    """Against a plain list for each set: add moves to the front, discard takes out."""
    rng, model = random.Random(1), {}
    keys = [key(i) for i in range(1500)]
    for _ in range(20000):
        one = rng.choice(keys)
        tag, first = table._place(one)
        told = model.setdefault(first, [])
        if tag in told:
            told.remove(tag)
        if rng.random() < 0.7:
            table.add(one)
            told.insert(0, tag)
            del told[WAYS:]
        else:
            table.discard(one)
        assert table._tags[first : first + WAYS].tolist() == told + [0] * (WAYS - len(told))


def test_without_memory_the_pool_works_and_remembers_nothing(pool_root, monkeypatch):
    def full(name, flags):
        raise OSError(28, "no space left")

    ghosts = Ghosts(full, geometry_for(1 << 20))
    ghosts.add(key(1))
    ghosts.discard(key(1))
    assert key(1) not in ghosts
    ghosts.close()


def test_a_thousand_misses_cost_one_look(pool_root, monkeypatch):
    store = opened(pool_root, 64 * GRANULE)
    put(store, [key(i) for i in range(64)])
    keys = [key(f"never{i}") for i in range(1000)]

    looks, real = [], Ghosts.__contains__
    monkeypatch.setattr(Ghosts, "__contains__", lambda ghosts, key: looks.append(key) or real(ghosts, key))
    assert store.exists(keys) == [MISS] * 1000
    assert looks == keys[:1]
    store.close()
