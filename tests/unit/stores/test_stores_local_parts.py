"""Geometry, fence, leases, clients: the parts of the embedded store by themselves."""

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.stores.local import arena, clients, fence, leases
from kvpool.stores.local.geometry import GRANULE, Geometry, geometry_for, slot_bytes_for
from kvpool.stores.local.leases import FOREVER, Leases
from kvpool.stores.local.slabs import Slab, SlabTable


@given(st.integers(GRANULE, 1 << 42))
def test_geometry_keeps_nearly_all_of_the_size(dram_bytes):
    geometry = geometry_for(dram_bytes)
    assert geometry.capacity <= dram_bytes
    assert geometry.capacity > dram_bytes * (1 - 1 / 32) or geometry.chunk_bytes == GRANULE
    assert geometry.chunk_bytes % GRANULE == 0


@given(st.integers(1, 4096), st.integers(1, 3 << 30))
def test_a_slab_holds_its_slots(chunks, nbytes):
    geometry = Geometry(1 << 20, chunks)
    slot_bytes = slot_bytes_for(nbytes)
    count = geometry.slab_chunks(slot_bytes)
    if count == 0:
        assert slot_bytes > geometry.capacity
        return
    slots = geometry.slots_per_slab(slot_bytes)
    assert slots >= 1
    assert slots * slot_bytes <= count * geometry.chunk_bytes <= geometry.capacity
    assert slots <= count * geometry.units_per_chunk, "slots of one slab must not share units with the next"


def test_too_small_a_pool_is_refused():
    with pytest.raises(ValueError, match="at least 4096"):
        geometry_for(4095)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), st.integers(1, 5), st.integers(0, 32))
def test_free_run_finds_the_first_free_window(slabs, chunks, limit):
    table = SlabTable(Geometry(1 << 16, 32))
    taken: set[int] = set()
    for first, count in slabs:
        span = set(range(first, min(first + count, 32)))
        if not span & taken:
            taken |= span
            table.insert(Slab(first, len(span), 4096, 1, False), 1)
    wanted = [first for first in range(limit - chunks + 1) if not taken & set(range(first, first + chunks))]
    assert table.free_run(chunks, limit) == (wanted[0] if wanted else None)


def test_fence_works_here():
    fence.make_fence()()


def test_fence_without_membarrier(monkeypatch):
    monkeypatch.setattr(fence, "_membarrier", lambda number: lambda command: -1)
    fence.make_fence("x86_64")()
    with pytest.raises(OSError, match="membarrier"):
        fence.make_fence("aarch64")
    with pytest.raises(OSError, match="riscv64"):
        fence.make_fence("riscv64")


@pytest.fixture
def joined(pool_root):
    geometry = Geometry(1 << 20, 16)
    directory = os.open(pool_root, os.O_RDONLY)
    client, fd = clients.join(directory, geometry.units * 8)
    table = Leases(clients.open_array(directory, client), geometry)
    peers = clients.Peers(directory, client)
    peers.refresh()
    yield table, peers, geometry, directory
    peers.close()
    table.close()
    os.close(fd)
    os.close(directory)


def stamps(peers, units):
    return peers.stamps(np.array(units, dtype=np.int64)).tolist()


def test_holds_on_one_slot_end_one_by_one(joined):
    table, peers, _, _ = joined
    table.hold([5, 700], 100)
    table.hold([5], 300)
    table.hold([5], FOREVER)
    assert stamps(peers, [700, 5, 6]) == [100, FOREVER, 0]
    table.drop([5], FOREVER)
    assert stamps(peers, [5]) == [300]
    table.drop([5], 100)
    assert stamps(peers, [5]) == [300]
    table.drop([5, 700], 300)
    table.drop([5], 300)
    assert stamps(peers, [5, 700]) == [0, 100]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=40))
def test_stamp_is_the_latest_hold(moves):
    table = object.__new__(Leases)
    table._lock, table._holds, table._purge_at, table.drops = threading.Lock(), {}, 4096, 0
    table._stamps, table._has_memory = np.zeros(8, dtype=np.int64), {0}
    model: dict[int, list[int]] = {}
    for hold, unit, until in moves:
        if hold:
            table.hold([unit], until)
            model.setdefault(unit, []).append(until)
        else:
            table.drop([unit], until)
            if until in model.get(unit, []):
                model[unit].remove(until)
        assert table._stamps[:6].tolist() == [max(model.get(unit, []), default=0) for unit in range(6)]


def test_holds_that_ran_out_are_forgotten(joined):
    table, _, geometry, _ = joined
    for unit in range(geometry.units):
        table.hold([unit], time.monotonic_ns() + 1)
    time.sleep(0.01)
    table._purge_at = 0
    table.hold([1], FOREVER)
    assert list(table._holds) == [1]
    assert table.held() == (0, 1)


def test_no_memory_for_a_lease_holds_nothing(joined, monkeypatch):
    table, peers, _, _ = joined
    table.hold([1], 100)

    def refuse(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(leases, "allocate", refuse)
    table.hold([2], 100)  # on the same page
    with pytest.raises(OSError, match="full"):
        table.hold([3, 2000], 100)
    assert stamps(peers, [1, 2, 3, 2000]) == [100, 100, 0, 0]


def test_a_client_lives_while_it_holds_its_lock(joined):
    _, peers, geometry, directory = joined
    other, fd = clients.join(directory, geometry.units * 8)
    assert peers.alive(other)
    assert set(peers.refresh()) == {other, peers._me}
    with mmap.mmap(fd, geometry.units * 8) as view:
        view[8:16] = (77).to_bytes(8, "little")
    assert stamps(peers, [1]) == [77]
    os.close(fd)
    assert not peers.alive(other)
    assert peers.refresh() == [peers._me]
    assert stamps(peers, [1]) == [0], "the leases of the dead count for nothing"
    assert peers.bury() == 1
    assert not peers.alive(other)


def test_reading_stamps_takes_no_memory(joined):
    _, peers, geometry, directory = joined
    before = os.stat(clients._name(peers._me), dir_fd=directory).st_blocks
    assert stamps(peers, list(range(geometry.units))) == [0] * geometry.units
    assert os.stat(clients._name(peers._me), dir_fd=directory).st_blocks == before


def test_arena_warns_once_and_tells_how_far_it_came(pool_root, monkeypatch, caplog):
    geometry = Geometry(1 << 16, 8)
    fd = os.open(pool_root / "arena", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, geometry.capacity)
    area = arena.Arena(fd, geometry)

    def refuse(fd, offset, nbytes):
        if offset >= 3 << 16:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(arena, "allocate", refuse)
    assert area.ensured(1, 4) is None
    assert area.ensure(1, 4) == 2
    assert area.ensured(1, 4) == 2
    assert area.ensured(1, 2) == 2
    assert area.ensure(3, 1) == 0
    assert len([record for record in caplog.records if "shrinks" in record.message]) == 1
    area.close()
