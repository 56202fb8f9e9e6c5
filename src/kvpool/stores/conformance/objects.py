"""Checks of whole objects, of opening and closing, and of removal."""

from __future__ import annotations

import threading

import numpy as np

from kvpool.stores.base import MISS, Batch, Hit, Status
from kvpool.stores.conformance.bench import SIZE, Bench, found, raises, require, same, sane, statuses


def put_then_get(bench: Bench) -> None:
    store, keys, data = bench.store(), [bench.key(i) for i in range(8)], bench.content(1, 8)
    results = bench.put(store, keys, data)
    same(statuses(results), [Status.OK] * 8, "put of new keys")
    same([result.nbytes for result in results], [SIZE] * 8, "bytes of a put")
    bench.reads(store, keys, data)
    told = {answer.nbytes for answer in store.exists(keys) if isinstance(answer, Hit)}
    require(
        told in ({SIZE}, {0}), f"length told by exists: got {told}, expected {SIZE}, or 0 of a store that does not tell lengths"
    )


def segments_are_the_callers_matter(bench: Bench) -> None:
    store, keys, data = bench.store(), [bench.key(i) for i in range(3)], bench.content(2, 3)
    bench.stored(store, keys, data)
    bench.reads(store, keys, data, segment=768)
    bench.reads(store, keys, data, segment=SIZE)


def odd_lengths(bench: Bench) -> None:
    store = bench.store()
    for nbytes in (1, 4095, 4097, 100_003):
        data = bench.content(nbytes, 2, nbytes)
        keys = [bench.key(f"{nbytes}-{i}") for i in range(2)]
        same(statuses(bench.put(store, keys, data, 1000)), [Status.OK] * 2, f"put of {nbytes} bytes")
        bench.reads(store, keys, data, segment=333)


def put_again_is_exists(bench: Bench) -> None:
    store, keys, data = bench.store(), [bench.key(i) for i in range(4)], bench.content(3, 4)
    bench.stored(store, keys[1:3], data[1:3])
    got = statuses(bench.put(store, keys, data))
    same(got, [Status.OK, Status.EXISTS, Status.EXISTS, Status.OK], "put over two present keys")
    other = bench.put(store, keys[:1], bench.content(99))
    same(statuses(other), [Status.EXISTS], "put of other bytes under a present key")
    bench.reads(store, keys, data)


def results_keep_the_order_of_keys(bench: Bench) -> None:
    store, keys, data = bench.store(), [bench.key(i) for i in range(6)], bench.content(4, 6)
    bench.stored(store, keys[::2], data[::2])
    results, got = bench.get(store, keys)
    wanted = [Status.OK if i % 2 == 0 else Status.MISSING for i in range(6)]
    same(statuses(results), wanted, "get of every second key")
    require(np.array_equal(got[::2], data[::2]), "the bytes of present keys beside missing ones are wrong")
    same(found(store, keys), [status is Status.OK for status in wanted], "exists of every second key")


def bc_097_a_hit_always_has_its_bytes(bench: Bench) -> None:
    store, keys, data = bench.store(), [bench.key(i) for i in range(5)], bench.content(5, 5)
    bench.stored(store, keys, data)
    store.remove([keys[2]])
    results, _ = bench.get(store, keys)
    same([status is Status.OK for status in statuses(results)], found(store, keys), "get and exists agree")
    same(statuses(results).count(Status.MISSING), 1, "missing keys")


def another_length_is_no_hit(bench: Bench) -> None:
    store, key, data = bench.store(), bench.key("a"), bench.content(6)
    bench.stored(store, [key], data)
    results, _ = bench.get(store, [key], nbytes=SIZE * 2)
    require(results[0].status is not Status.OK, "a get of more bytes than the object has succeeded")


def bc_155_duplicates_in_a_batch(bench: Bench) -> None:
    store, data = bench.store(), bench.content(7, 2)
    keys = [bench.key("a"), bench.key("b"), bench.key("a")]
    results = bench.put(store, keys, data[[0, 1, 0]])
    require(all(result.stored for result in results), f"a batch with one key twice gave {statuses(results)}")
    same(sum(result.status is Status.OK for result in results), 2, "objects counted as stored")
    bench.reads(store, keys[:2], data)


def bc_169_large_batches(bench: Bench) -> None:
    store = bench.store()
    keys, data = [bench.key(i) for i in range(40_000)], bench.content(8, 40, 64)
    chosen = list(range(0, 40_000, 1000))
    bench.stored(store, [keys[i] for i in chosen], data)
    same([i for i, hit in enumerate(found(store, keys)) if hit], chosen, "hits among 40,000 keys")
    results, _ = bench.get(store, keys[:2500], 64)
    same([i for i, status in enumerate(statuses(results)) if status is Status.OK], [0, 1000, 2000], "gets among 2,500 keys")


def empty_calls(bench: Bench) -> None:
    store = bench.store()
    none = np.zeros((0, SIZE), dtype=np.uint8)
    same(bench.put(store, [], none), [], "put of nothing")
    same(bench.get(store, [])[0], [], "get of nothing")
    same(store.exists([]), [], "exists of nothing")
    same(store.remove([]), [], "remove of nothing")
    store.release(store.lease([], 1.0))


def misuse_is_a_value_error(bench: Bench) -> None:
    store = bench.store()
    raises(lambda: Batch([b"a"], np.zeros((2, 1), dtype=np.int64), np.ones(1, dtype=np.int64)), "addresses of a wrong shape")
    raises(lambda: store.put(bench.batch([bench.key("a")], np.zeros((1, 0), dtype=np.uint8)), 1.0), "an object of no bytes")
    raises(lambda: store.put(bench.batch([b""], bench.content(1)), 1.0), "an empty key")
    long = b"k" * (store.capabilities.max_key_len + 1)
    raises(lambda: store.put(bench.batch([long], bench.content(1)), 1.0), "a key too long")
    same(store.exists([b"", long]), [MISS, MISS], "exists of keys that cannot be")
    same(statuses(store.remove([b"", long])), [Status.MISSING] * 2, "remove of keys that cannot be")


def bc_092_calls_before_open_and_after_close(bench: Bench) -> None:
    never, store = bench.closed(), bench.store()
    key, data = bench.key("a"), bench.content(9)
    bench.stored(store, [key], data)
    store.close()
    store.close()
    for closed in (never, store):
        require(not isinstance(closed.exists([key])[0], Hit), "a closed store has a hit")
        lease = closed.lease([key], 1.0)
        same(len(lease.answers), 1, "answers of a lease")
        closed.release(lease)
        same(statuses(bench.put(closed, [key], data)), [Status.FATAL], "put on a closed store")
        same(statuses(bench.get(closed, [key])[0]), [Status.FATAL], "get on a closed store")
        same(statuses(closed.remove([key])), [Status.FATAL], "remove on a closed store")
        require(not closed.health().ok, "a closed store says it is well")
        same(closed.stats().objects, 0, "objects of a closed store")
        if closed.capabilities.ranged:
            same(statuses(closed.begin_write([key], SIZE, 1.0).results), [Status.FATAL], "begin_write on a closed store")
            same(statuses(closed.begin_read([key], 1.0).results), [Status.FATAL], "begin_read on a closed store")
        if closed.capabilities.listable:
            same(closed.list(), [], "list of a closed store")


def open_again(bench: Bench) -> None:
    keeper, store = bench.store(), bench.store()
    key, data = bench.key("a"), bench.content(10)
    bench.stored(store, [key], data)
    store.close()
    store.open()
    bench.reads(store, [key], data)
    bench.reads(keeper, [key], data)


def two_stores_on_one_pool(bench: Bench) -> None:
    one, two = bench.store(), bench.store()
    keys, data = [bench.key(i) for i in range(4)], bench.content(11, 4)
    bench.stored(one, keys[:2], data[:2])
    bench.reads(two, keys[:2], data[:2])
    same(statuses(bench.put(two, keys, data)), [Status.EXISTS] * 2 + [Status.OK] * 2, "put by the second store")
    bench.reads(one, keys, data)
    two.close()
    bench.reads(one, keys, data)


def health_and_stats(bench: Bench) -> None:
    store = bench.store()
    require(store.health().ok, f"health of a new store: {store.health().text}")
    for round_ in range(3):
        bench.put(store, [bench.key(f"{round_}-{i}") for i in range(8)], bench.content(round_, 8))
        sane(store)


def many_threads(bench: Bench) -> None:
    store, failures = bench.store(), list[str]()

    def work(me: int) -> None:
        try:
            for turn in range(6):
                seed = (me * 7 + turn * 3) % 11
                keys, data = [bench.key(f"{seed}-{i}") for i in range(4)], bench.content(seed, 4)
                bench.put(store, keys, data)
                results, got = bench.get(store, keys)
                for row, result in enumerate(results):
                    if result.status is Status.OK and not np.array_equal(got[row], data[row]):
                        failures.append(f"wrong bytes under {keys[row]!r}")
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    same(failures, [], "failures in threads")
    sane(store)


def remove_and_put_again(bench: Bench) -> None:
    store, other = bench.store(), bench.store()
    key, old, new = bench.key("a"), bench.content(15), bench.content(16)
    bench.stored(store, [key], old)
    bench.reads(store, [key], old)
    same(statuses(store.remove([key, bench.key("b")])), [Status.OK, Status.MISSING], "remove")
    same(found(store, [key]), [False], "presence after remove")
    bench.stored(other, [key], new)
    bench.reads(store, [key], new)  # BC-099: never the old bytes


def remove_while_leased(bench: Bench) -> None:
    store = bench.store("leases")
    key = bench.key("a")
    bench.stored(store, [key], bench.content(17))
    lease = store.lease([key], 60.0)
    require(store.remove([key])[0].status in (Status.BUSY, Status.OK), "remove of a leased key")
    same(found(store, [key]), [False], "presence after remove")
    new = bench.content(18)
    bench.stored(store, [key], new)
    store.release(lease)
    bench.reads(store, [key], new)


def list_and_clear(bench: Bench) -> None:
    store = bench.store("listable")
    mine = [bench.key(i, variant="a") for i in range(5)]
    others = [bench.key(i, variant="b") for i in range(5)]
    both, prefix = bench.key("")[:18], bench.key("", variant="a")[:19]
    bench.stored(store, mine + others, bench.content(19, 10))
    same(sorted(store.list(prefix)), sorted(mine), "list by prefix")
    same(sorted(store.list(both)), sorted(mine + others), "list by a shorter prefix")
    require(set(mine + others) <= set(store.list()), "list of all lacks some")
    same(store.clear(prefix), 5, "how many were cleared")
    same(found(store, mine + others), [False] * 5 + [True] * 5, "presence after clear")
