"""Parts of the MemCache store that need no library: codes, leases, keys of dead writers, sessions on a library that misbehaves."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvpool.options.memcache_conf import read_local_conf
from kvpool.stores.base import Result, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.memcache import MemcacheStore, codes, half_written
from kvpool.stores.memcache.directions import directions
from kvpool.stores.memcache.half_written import HalfWritten
from kvpool.stores.memcache.leases import Leases
from kvpool.stores.memcache.ranged import MemcacheReader, MemcacheWriter


class FakeLibrary:
    """Keys with a state, and the traps of the real one: a living object's address, and a blocked key that can be published."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}  # writing | stored
        self.leased: list[str] = []
        self.removed: list[str] = []
        self.copy_code = 0
        self.copies = 0
        self.room = 100

    def batch_add_lease(self, keys, leaseTtlMs=0):
        found = {"stored": 0, "writing": codes.BEING_WRITTEN, None: codes.NO_SUCH_KEY}
        answers = [found[self.states.get(key)] for key in keys]
        self.leased += [key for key, code in zip(keys, answers, strict=True) if code == 0]
        return answers

    def batch_remove_lease(self, keys):
        for key in keys:
            self.leased.remove(key)
        return 0

    def remove_batch(self, keys):
        self.removed += keys
        return [0 if self.states.pop(key, None) else codes.NO_SUCH_KEY for key in keys]

    def batch_alloc(self, keys, sizes, media=1, leaseTtlMs=0):
        starts = []
        for key in keys:
            if key not in self.states and self.room:
                self.states[key] = "writing"
                self.room -= 1
            starts.append(hash(key) if key in self.states else 0)
        return starts

    def batch_copy_layers(self, gva_ptrs, buffer_ptrs, sizes, direct):
        self.copies += 1
        return self.copy_code

    def batch_write_finish(self, keys, res):
        for key, code in zip(keys, res, strict=True):
            if code == 0:
                self.states[key] = "stored"
        return [0] * len(keys)

    def batch_is_exist(self, keys):
        return [int(self.states.get(key) == "stored") for key in keys]

    def batch_get_key_info(self, keys, flag=0):
        return [FakeInfo(hash(key) if key in self.states else 0) for key in keys]


class FakeInfo:
    def __init__(self, start: int) -> None:
        self.start = start

    def size(self) -> int:
        return 64 if self.start else 0

    def gva_list(self) -> list[int]:
        return [self.start] if self.start else []

    def type_list(self) -> list[int]:
        return [1] if self.start else []


def writer_of(fake: FakeLibrary, *keys: str) -> MemcacheWriter:
    writer = MemcacheWriter(direct(fake), directions("cpu"), list(keys), 64, 5.0)
    writer.begin()
    return writer


def reader_of(fake: FakeLibrary, *keys: str) -> MemcacheReader:
    reader = MemcacheReader(direct(fake), directions("cpu"), Leases(), list(keys), 5.0)
    reader.begin()
    return reader


def direct(fake: FakeLibrary):
    def calls(work, count, until):
        if time.monotonic() > until:
            return [Result(Status.TRANSIENT, text="deadline")] * count
        return work(fake)

    return calls


def piece(rows: int, nbytes: int = 64):
    return np.zeros((rows, 1), dtype=np.int64), np.array([nbytes], dtype=np.int64)


def statuses(results):
    return [result.status for result in results]


def test_codes_of_puts_and_gets():
    assert codes.put_result(0, 7) == Result(Status.OK, 7)
    assert codes.put_result(codes.DUPLICATE, 7).status is Status.EXISTS
    assert codes.put_result(codes.BEING_WRITTEN, 7).status is Status.BUSY
    assert codes.put_result(-1, 7).status is Status.NO_SPACE
    assert codes.get_result(-3012, 7).status is Status.MISSING
    assert codes.get_result(-1, 7).status is Status.TRANSIENT
    assert codes.get_result(-3014, 7) == Result(Status.TRANSIENT, code=-3014, text="the meta service does not answer")
    assert codes.get_result(codes.CLOSED, 7).status is Status.FATAL
    assert codes.remove_result(codes.NO_SUCH_KEY).status is Status.MISSING
    assert codes.get_result(-4711, 7) == Result(Status.TRANSIENT, code=-4711, text="code -4711 of the library")


def test_directions_follow_the_memory():
    assert directions("cpu") == (3, 2)
    assert directions("npu") == (0, 1)
    with pytest.raises(ValueError, match=r"does not reach the memory of cuda; accepted: mooncake$"):
        directions("cuda")


def test_the_address_of_a_stored_object_is_never_written():
    fake = FakeLibrary()
    fake.states["old"] = "stored"
    writer = writer_of(fake, "old", "new")
    assert statuses(writer.results) == [Status.EXISTS, Status.OK]
    assert statuses(writer.write([0], 0, *piece(1))) == [Status.FATAL]
    assert fake.copies == 0
    assert fake.leased == []  # BC-086: each lease was ended


def test_a_key_that_was_stored_between_look_and_allocation_is_not_written():
    fake = FakeLibrary()
    real = fake.batch_alloc

    def beaten(keys, sizes, media=1, leaseTtlMs=0):
        fake.states["new"] = "stored"
        return real(keys, sizes, media)

    fake.batch_alloc = beaten
    writer = writer_of(fake, "new")
    assert statuses(writer.results) == [Status.EXISTS]
    assert statuses(writer.commit()) == [Status.EXISTS]
    assert fake.removed == []  # it is not ours to remove


def test_an_aborted_key_is_removed_so_that_it_can_never_be_published_as_garbage():
    fake = FakeLibrary()
    writer = writer_of(fake, "a")
    writer.write([0], 0, *piece(1, 32))
    writer.abort()
    assert fake.removed == ["a"]
    assert statuses(writer.commit()) == [Status.TRANSIENT]
    assert fake.batch_is_exist(["a"]) == [0]


def test_a_failed_copy_is_never_published():
    fake = FakeLibrary()
    writer = writer_of(fake, "a")
    fake.copy_code = -1
    assert statuses(writer.write([0], 0, *piece(1, 32))) == [Status.TRANSIENT]
    fake.copy_code = 0
    writer.write([0], 0, *piece(1, 32))
    writer.write([0], 32, *piece(1, 32))
    assert statuses(writer.commit()) == [Status.TRANSIENT]
    assert fake.batch_is_exist(["a"]) == [0]


def test_nothing_is_written_once_the_writer_is_taken_for_dead(monkeypatch):
    monkeypatch.setattr(half_written, "LONGEST_WRITE_S", 0.05)
    fake = FakeLibrary()
    writer = writer_of(fake, "a")
    time.sleep(0.1)
    assert statuses(writer.write([0], 0, *piece(1))) == [Status.TRANSIENT]
    assert fake.copies == 0
    assert statuses(writer.commit()) == [Status.TRANSIENT]
    assert fake.removed == ["a"]


def test_what_could_not_be_published_is_removed_and_nothing_else():
    fake = FakeLibrary()
    writer = writer_of(fake, "a", "b", "c")
    writer.write([0, 1, 2], 0, *piece(3))
    fake.batch_write_finish = lambda keys, res: [fake.states.update(a="stored") or 0, -3014, codes.DUPLICATE]
    assert statuses(writer.commit()) == [Status.OK, Status.TRANSIENT, Status.EXISTS]
    assert fake.removed == ["b"]
    writer.abort()
    assert fake.removed == ["b"]


def test_no_room_for_a_session():
    fake = FakeLibrary()
    fake.room = 1
    writer = writer_of(fake, "a", "b")
    assert statuses(writer.results) == [Status.OK, Status.NO_SPACE]


def test_bc_086_a_reader_ends_each_lease_once_also_after_errors():
    fake = FakeLibrary()
    fake.states = {"a": "stored", "b": "stored"}
    reader = reader_of(fake, "a", "none", "b")
    assert statuses(reader.results) == [Status.OK, Status.MISSING, Status.OK]
    fake.copy_code = -3106
    assert statuses(reader.read([0, 1, 2], 0, *piece(3))) == [Status.TRANSIENT, Status.MISSING, Status.TRANSIENT]
    reader.end()
    reader.end()
    assert fake.leased == []


def test_an_object_removed_under_a_reader_is_missing():
    fake = FakeLibrary()
    fake.states = {"a": "stored"}
    reader = reader_of(fake, "a")
    fake.remove_batch(["a"])
    assert statuses(reader.read([0], 0, *piece(1))) == [Status.MISSING]


def test_keys_of_a_dead_writer_are_freed_after_the_patience_only():
    fake, half = FakeLibrary(), HalfWritten(patience_s=0.1)
    fake.states = {"dead": "writing", "stored": "stored"}
    assert half.free(fake, ["dead", "stored", "gone"]) == []
    assert fake.removed == []
    time.sleep(0.15)
    assert half.free(fake, ["dead"]) == ["dead"]
    assert fake.removed == ["dead"]


def test_a_key_that_was_stored_meanwhile_starts_its_patience_anew():
    fake, half = FakeLibrary(), HalfWritten(patience_s=0.1)
    fake.states = {"a": "writing"}
    half.free(fake, ["a"])
    fake.states = {"a": "stored"}
    half.free(fake, ["a"])
    time.sleep(0.15)
    fake.states = {"a": "writing"}
    assert half.free(fake, ["a"]) == []


def test_room_of_another_writer_under_the_same_key_starts_its_patience_anew():
    fake, half = FakeLibrary(), HalfWritten(patience_s=0.1)
    fake.states = {"a": "writing"}
    half.free(fake, ["a"])
    time.sleep(0.15)
    fake.batch_get_key_info = lambda keys, flag=0: [FakeInfo(4711) for _ in keys]
    assert half.free(fake, ["a"]) == []
    assert fake.removed == []


@pytest.mark.parametrize("look", [lambda store: store._exists([b"a"]), lambda store: store._lease([b"a"], 5.0)])
def test_a_key_that_a_lookup_found_readable_starts_its_patience_anew(monkeypatch, look):
    text = "ock.mmc.meta_service_url = tcp://127.0.0.1:1\nock.mmc.local_service.config_store_url = tcp://127.0.0.1:1\n"
    store = MemcacheStore(read_local_conf(text, "mmc-local.conf").options, StoreContext(), "mmc-local.conf")
    fake, half = FakeLibrary(), HalfWritten(patience_s=0.1)
    store._half_written = half
    monkeypatch.setattr(store, "_library", lambda: fake)
    fake.states = {"a": "writing"}
    half.free(fake, ["a"])
    fake.states = {"a": "stored"}
    look(store)
    time.sleep(0.15)
    fake.states = {"a": "writing"}
    assert half.free(fake, ["a"]) == []
    assert fake.removed == []


def test_a_key_of_which_the_library_cannot_tell_is_not_half_written():
    fake, half = FakeLibrary(), HalfWritten(patience_s=0.1)
    fake.states = {"a": "stored"}
    fake.batch_is_exist = lambda keys: [-3014] * len(keys)
    half.free(fake, ["a"])
    time.sleep(0.15)
    assert half.free(fake, ["a"]) == []
    assert fake.removed == []


def test_bc_086_two_leases_on_one_object_end_one_by_one():
    fake, leases = FakeLibrary(), Leases()
    fake.states = {"a": "stored"}
    first, _ = leases.take(fake, ["a", "none"], 60.0)
    second, found = leases.take(fake, ["a"], 60.0)
    assert found == [0]
    leases.give(fake, first)
    leases.give(fake, first)
    assert fake.leased == ["a"]
    leases.give(fake, second)
    leases.give(fake, second)
    assert fake.leased == []
    assert leases.count() == 0


def test_leases_that_ran_out_are_ended_with_the_next_one():
    fake, leases = FakeLibrary(), Leases()
    fake.states = {"a": "stored"}
    token, _ = leases.take(fake, ["a"], 0.01)
    time.sleep(0.05)
    assert leases.count() == 0
    assert fake.leased == ["a"]  # the library protects it still
    leases.take(fake, ["none"], 60.0)
    assert fake.leased == []
    leases.give(fake, token)
    assert fake.leased == []
