"""Checks of objects written and read in pieces, and of slots used in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.base import Reader, Status, Store, Writer
from kvpool.stores.conformance.bench import (
    DEADLINE,
    MOST_TO_FILL,
    SIZE,
    Bench,
    Bytes,
    fill,
    found,
    raises,
    require,
    same,
    sane,
    statuses,
)


def piece(memory: Bytes, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Addresses and sizes of a range of every row, as two segments."""
    half = (start + end) // 2
    rows = memory.ctypes.data + np.arange(len(memory), dtype=np.int64) * memory.strides[0]
    return rows[:, None] + np.array([start, half]), np.array([half - start, end - half])


def begun(store: Store, keys: Sequence[bytes]) -> Writer:
    writer = store.begin_write(keys, SIZE, DEADLINE)
    same(statuses(writer.results), [Status.OK] * len(keys), "begin_write of new keys")
    return writer


def ranged_write_is_invisible_until_commit(bench: Bench) -> None:
    store = bench.store("ranged")
    keys, data = [bench.key(i) for i in range(3)], bench.content(20, 3)
    writer = begun(store, keys)
    for start in (0, SIZE // 2):
        same(found(store, keys), [False] * 3, "presence before commit")
        results = writer.write([0, 1, 2], start, *piece(data, start, start + SIZE // 2))
        same([(result.status, result.nbytes) for result in results], [(Status.OK, SIZE // 2)] * 3, "write of a piece")
    same(statuses(store.begin_write(keys[:1], SIZE, DEADLINE).results), [Status.BUSY], "begin_write of a key being written")
    same(statuses(bench.put(store, keys[:1], data[:1])), [Status.BUSY], "put of a key being written")
    same(statuses(writer.commit()), [Status.OK] * 3, "commit")
    bench.reads(store, keys, data)
    same(statuses(store.begin_write(keys[:1], SIZE, DEADLINE).results), [Status.EXISTS], "begin_write of a stored key")


def ranged_commit_of_some(bench: Bench) -> None:
    store = bench.store("ranged")
    keys, data = [bench.key(i) for i in range(3)], bench.content(21, 3)
    writer = begun(store, keys)
    writer.write([0, 1, 2], 0, *piece(data, 0, SIZE))
    results = writer.commit([0, 2])
    same([result.status is Status.OK for result in results], [True, False, True], "commit of two of three")
    same(found(store, keys), [True, False, True], "presence after the commit of two of three")
    bench.stored(store, keys[1:2], data[1:2])


def ranged_abort(bench: Bench) -> None:
    store = bench.store("ranged")
    key, data = bench.key("a"), bench.content(22)
    writer = begun(store, [key])
    writer.write([0], 0, *piece(data, 0, SIZE))
    writer.abort()
    writer.abort()
    same(found(store, [key]), [False], "presence after abort")
    bench.stored(store, [key], data)


def ranged_half_written_is_never_visible(bench: Bench) -> None:
    store = bench.store("ranged")
    key, data = bench.key("a"), bench.content(23)
    writer = begun(store, [key])
    writer.write([0], 0, *piece(data, 0, SIZE // 2))
    require(writer.commit()[0].status is not Status.OK, "a half-written object was committed")
    same(found(store, [key]), [False], "presence of a half-written object")
    bench.stored(store, [key], data)


def ranged_read(bench: Bench) -> None:
    store = bench.store("ranged")
    keys, data = [bench.key(i) for i in range(2)], bench.content(24, 2)
    bench.stored(store, keys, data)
    reader: Reader = store.begin_read([*keys, bench.key("none")], DEADLINE)
    same(statuses(reader.results), [Status.OK, Status.OK, Status.MISSING], "begin_read")
    if 0 < store.stats().capacity_bytes <= MOST_TO_FILL:
        fill(bench, store, "a")
    got = np.zeros_like(data)
    for start in (SIZE // 2, 0):
        same(statuses(reader.read([0, 1], start, *piece(got, start, start + SIZE // 2))), [Status.OK] * 2, "read of a piece")
    require(np.array_equal(got, data), "the pieces read are not the bytes written")
    raises(lambda: reader.read([0], SIZE // 2, *piece(got[:1], 0, SIZE)), "a read beyond the object")
    reader.end()
    reader.end()


def slot_view(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def reserve_publish_discard(bench: Bench) -> None:
    store = bench.mapped()
    slots = store.reserve(3, SIZE, DEADLINE)
    same(len(slots), 3, "reserved slots")
    data = bench.content(25, 3)
    for row, slot in enumerate(slots):
        slot_view(slot.address, slot.nbytes)[:] = data[row]
    same(store.stats().writing, 3, "slots being written")
    pairs = [(slots[0], bench.key("a")), (slots[1], bench.key("b"))]
    same(statuses(store.publish(pairs, DEADLINE)), [Status.OK] * 2, "publish")
    store.discard(slots[2:])
    bench.reads(store, [bench.key("a"), bench.key("b")], data[:2])
    (twin,) = store.reserve(1, SIZE, DEADLINE)
    same(statuses(store.publish([(twin, bench.key("a"))], DEADLINE)), [Status.EXISTS], "publish under a stored key")
    bench.reads(store, [bench.key("a")], data[:1])
    same(store.stats().writing, 0, "slots being written at the end")


def publish_twice_fails(bench: Bench) -> None:
    store = bench.mapped()
    (slot,) = store.reserve(1, SIZE, DEADLINE)
    same(statuses(store.publish([(slot, bench.key("a"))], DEADLINE)), [Status.OK], "publish")
    require(not store.publish([(slot, bench.key("b"))], DEADLINE)[0].stored, "a slot was published twice")
    store.discard([slot])
    same(found(store, [bench.key("a"), bench.key("b")]), [True, False], "presence after a late discard")


def pin_reads_in_place(bench: Bench) -> None:
    store = bench.mapped()
    key, data = bench.key("a"), bench.content(26)
    bench.stored(store, [key], data)
    pins = store.pin([bench.key("none"), key])
    same(pins.addresses[0], 0, "address of a missing key")
    same(pins.nbytes[1], SIZE, "length of a pinned object")
    fill(bench, store, "a")
    require(np.array_equal(slot_view(pins.addresses[1], SIZE), data[0]), "a pinned object changed")
    same(statuses(store.remove([key])), [Status.BUSY], "remove of a pinned object")
    fill(bench, store, "b")
    require(np.array_equal(slot_view(pins.addresses[1], SIZE), data[0]), "a pinned object changed after its removal")
    same(store.stats().pinned, 1, "pinned objects")
    store.unpin(pins)
    same(store.stats().pinned, 0, "pinned objects after unpin")


def reserve_when_full(bench: Bench) -> None:
    store = bench.mapped()
    nbytes = 64 << 10
    room = store.stats().capacity_bytes // nbytes
    slots = store.reserve(room + 8, nbytes, DEADLINE)
    require(room // 2 <= len(slots) <= room, f"{len(slots)} slots reserved in a pool for {room}")
    same(statuses(bench.put(store, [bench.key("a")], bench.content(27))), [Status.NO_SPACE], "put into a full pool")
    sane(store)
    store.discard(slots)
    bench.stored(store, [bench.key("a")], bench.content(27))
