"""Parts of the disk tier: calls on I/O threads, buffers, the switch, what is copied next, who may use a folder."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.mounts import mounted
from tests.unit.stores.helpers import batch, get, has, key, opened, put
from tests.waiting import eventually

from kvpool.stores.base import Status, Tier
from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local.arena import COPIED, MARKS, SEEN
from kvpool.stores.local.disk import tier as tier_module
from kvpool.stores.local.disk.bounce import Bounce
from kvpool.stores.local.disk.choose import Occupied, Vacant, to_copy
from kvpool.stores.local.disk.folder import DiskFolder
from kvpool.stores.local.disk.iopool import Busy, IoCall, IoPool

MIB = 1 << 20
EAGER = {"dram_high": 0, "dram_low": 0}
COPIED_ALL, HELD_BY_NOBODY = "all that is in memory is on the disk too", "the copying holds nothing any more"


def settings(ssd: Path, nbytes: int = 32 * MIB, **others) -> DiskSettings:
    return DiskSettings(str(ssd), nbytes, **{**EAGER, **others})


# calls


def test_a_call_given_up_in_the_queue_never_runs():
    gate, ran, cleaned = threading.Event(), [], []
    io = IoPool(1)
    first = IoCall(lambda: gate.wait() and None, lambda: None)
    second = IoCall(lambda: ran.append(1), lambda: cleaned.append(1))
    io.submit([first, second])
    assert not second.wait(0.05)
    assert not second.give_up()
    assert cleaned == [1]
    gate.set()
    assert first.wait(30)
    assert io.close(30)
    assert (ran, cleaned) == ([], [1])


def test_a_call_given_up_while_it_runs_cleans_up_at_its_end():
    gate, cleaned = threading.Event(), threading.Event()
    io = IoPool(1)
    call = IoCall(lambda: gate.wait() and None, cleaned.set)
    io.submit([call])
    eventually(lambda: io.oldest_s() > 0, "the call runs")
    assert not call.give_up()
    assert not cleaned.is_set()
    assert not io.close(0.05), "it still runs"
    gate.set()
    assert cleaned.wait(30)
    assert io.close(30)


def test_errors_are_told_and_calls_after_close_are_refused():
    io = IoPool(2)
    call = IoCall(lambda: os.close(-1), lambda: None)
    io.submit([call])
    assert call.wait(30)
    assert call.give_up()
    assert isinstance(call.error, OSError)
    assert io.close(30)
    late = IoCall(lambda: None, lambda: None)
    io.submit([late])
    assert late.wait(30)
    assert isinstance(late.error, Busy)


def test_buffers_are_bounded():
    bounce = Bounce(3 * 4096)
    taken = [bounce.take(4096) for _ in range(4)]
    assert taken[3] is None
    assert all(address % 4096 == 0 for address in taken[:3])
    assert not bounce.wait(4096, time.monotonic() + 0.05)
    bounce.give(taken[0])
    assert bounce.wait(4096, time.monotonic() + 5)
    assert not bounce.wait(4 * 4096, time.monotonic() + 60), "it never fits: no use in waiting"
    assert bounce.peak == 3 * 4096


# what is copied


def memory(*stamps: int, capacity: int = 10) -> Occupied:
    count = len(stamps)
    return Occupied(np.arange(count), np.ones(count, dtype=np.int64), np.array(stamps, dtype=np.int64), capacity)


def chosen(pool: Occupied, nbytes: int = 100, begun: bool = False, **others) -> list[int]:
    wanted = DiskSettings("/", MIB, **{"dram_high": 80, "dram_low": 60, **others})
    return to_copy(pool, wanted, nbytes, begun=begun).tolist()


def times(*order: int, marks: int = 0) -> list[int]:
    return [place * MARKS | marks for place in order]


def test_vacant_slots_are_left_out_for_a_while():
    vacant, brief = Vacant(seconds=600.0), Vacant(seconds=0.001)
    for each in (vacant, brief):
        each.add([1, 2])
    time.sleep(0.002)
    assert vacant.left_out(memory(*times(1, 2, 3, 4))).units.tolist() == [0, 3]
    assert brief.left_out(memory(*times(1, 2, 3, 4))).units.tolist() == [0, 1, 2, 3]


def test_the_demoter_is_soon_back_when_eviction_was_faster(pool_root, ssd):
    """Or the disk is full: then it comes less and less often."""
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    pause = store._pool.disk.demoter.pause_after
    assert [pause(0) for _ in range(7)] == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1])
    assert [pause(copied) for copied in (4, 0)] == pytest.approx([0.0, 0.005])
    store.close()


def test_nothing_is_copied_below_the_high_watermark():
    assert chosen(memory(*times(1, 2, 3, 4, 5, 6, 7, 8))) == []
    assert chosen(memory()) == []


def test_the_coldest_are_copied_down_to_the_low_one():
    assert chosen(memory(*times(9, 8, 7, 6, 5, 4, 3, 2, 1))) == [8, 7, 6]
    assert chosen(memory(*times(9, 8, 7, 6, 5, 4, 3, 2, 1)), nbytes=1) == [8]
    assert chosen(memory(*times(8, 7, 6, 5, 4, 3, 2, 1)), begun=True) == [7, 6]


def test_what_is_copied_already_counts_as_free():
    stamps = times(9, 8, 7, 6, 5, 4, 3) + times(2, 1, marks=COPIED)
    assert chosen(memory(*stamps)) == []
    assert chosen(memory(*stamps), begun=True) == [6]


def test_second_sight_copies_only_what_was_asked_for_again():
    stamps = times(9, 8, 7, 6, 5, 4, 3) + times(2, 1, marks=SEEN)
    assert chosen(memory(*stamps), admission="second_sight") == [8, 7]
    assert chosen(memory(*times(*range(9))), admission="second_sight") == []


def test_second_sight_in_a_store(pool_root, ssd):
    store = opened(pool_root, 8 * MIB, disk=settings(ssd, admission="second_sight"))
    keys = [key(n) for n in range(6)]
    put(store, keys, 65536)
    get(store, keys[:2], 65536)
    store.release(store.lease(keys[2:3], 1.0))
    put(store, keys[3:4], 65536)
    eventually(lambda: store.stats().tiers[1].objects == 4, COPIED_ALL)
    time.sleep(0.3)
    assert store.stats().tiers[1].objects == 4
    store.close()


# settings and folders


@pytest.mark.parametrize(
    "wrong",
    [{"folder": "a/b"}, {"nbytes": 1}, {"dram_low": 90}, {"dram_high": 101}, {"low": 96}, {"low": 0}, {"admission": "some"}],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError) as told:
        DiskSettings(**{"folder": "/a", "nbytes": MIB, **wrong})
    assert "\n" not in str(told.value)


def test_folders_that_are_not_used(tmp_path, ssd):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(ssd)
    (ssd / "open").mkdir(mode=0o777)
    (ssd / "open").chmod(0o777)
    (ssd / "elsewhere").symlink_to(tmp_path)
    cases = [(tmp_path / "none", "x"), (tmp_path / "file", "x"), (tmp_path / "link", "x"), (ssd, "open"), (ssd, "elsewhere")]
    for parent, name in cases:
        with pytest.raises(OSError, match=r".") as told:
            DiskFolder(parent, name)
        assert "\n" not in str(told.value)
    made = DiskFolder(ssd, "pool")
    assert (ssd / "pool").stat().st_mode & 0o777 == 0o700
    made.close()


@pytest.mark.parametrize("change", [{"nbytes": 16 * MIB}, {"dram_high": 50}, {"admission": "second_sight"}, None])
def test_processes_of_a_pool_must_agree(pool_root, ssd, change):
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    other = None if change is None else settings(ssd, **change)
    with pytest.raises(ValueError, match="in use with other settings of its disk tier") as told:
        opened(pool_root, 8 * MIB, disk=other)
    assert all(name in str(told.value) for name in (change or {"no disk tier": 0}))
    store.close()
    opened(pool_root, 8 * MIB, disk=other).close()


def test_a_tier_cannot_be_added_while_the_pool_is_in_use(pool_root, ssd):
    store = opened(pool_root, 8 * MIB)
    with pytest.raises(ValueError, match="no disk tier there"):
        opened(pool_root, 8 * MIB, disk=settings(ssd))
    store.close()


def test_tools_join_whatever_there_is(pool_root, ssd):
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    tool = opened(pool_root, None)
    assert [one.tier for one in tool.stats().tiers] == [Tier.DRAM, Tier.DISK]
    tool.close()
    store.close()
    os.rename(ssd, ssd.with_name("gone"))
    tool = opened(pool_root, None)
    assert [one.tier for one in tool.stats().tiers] == [Tier.DRAM]
    tool.close()


def test_bc_152_two_pools_never_share_a_folder(pool_root, ssd):
    """Two pools of one name under different roots, and two names under one root."""
    (pool_root / "a").mkdir(mode=0o700)
    (pool_root / "b").mkdir(mode=0o700)
    first = opened(pool_root / "a", 8 * MIB, name="same", disk=settings(ssd))
    with pytest.raises(OSError, match="in use by another pool"):
        opened(pool_root / "b", 8 * MIB, name="same", disk=settings(ssd))
    other = opened(pool_root / "a", 8 * MIB, name="other", disk=settings(ssd))
    put(first, [key(1)], fill=1)
    put(other, [key(1)], fill=2)
    eventually(lambda: first.stats().tiers[1].objects == other.stats().tiers[1].objects == 1, COPIED_ALL)
    assert sorted(os.listdir(ssd)) == ["other", "same"]
    for store in (first, other):
        store.close()
    second = opened(pool_root / "b", 8 * MIB, name="same", disk=settings(ssd))
    assert get(second, [key(1)]) == [1], "its files are taken over when nobody uses them"
    second.remove([key(1)])
    second.close()
    first = opened(pool_root / "a", 8 * MIB, name="same", disk=settings(ssd))
    assert first.stats().tiers[1].objects == 0, "its books of before are not believed"
    assert get(first, [key(1)]) == [1]
    eventually(lambda: first.stats().tiers[1].objects == 1, COPIED_ALL)
    assert first.verify() == []
    first.close()


def test_another_size_keeps_what_fits_or_says_what_it_drops(pool_root, ssd, caplog):
    big = 8 << 30
    store = opened(pool_root, 8 * MIB, disk=settings(ssd, big))
    put(store, [key(n) for n in range(4)])
    eventually(lambda: store.stats().tiers[1].objects == 4, COPIED_ALL)
    store.close()
    store = opened(pool_root, 8 * MIB, disk=settings(ssd, 2 * big))
    assert store.stats().tiers[1].objects == 4, "the chunks are as large as before"
    store.close()
    store = opened(pool_root, 8 * MIB, disk=settings(ssd, 64 * MIB))
    assert "nothing of it can be kept" in caplog.text
    store.close()


# gets


def test_bc_151_a_load_larger_than_the_buffers(pool_root, ssd, monkeypatch):
    """All memory is taken, so that reads need buffers: they are bounded together, and what never fits fails alone."""
    monkeypatch.setattr(tier_module, "BOUNCE_BYTES", MIB)
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    small, large = [key(n) for n in range(48)], [key("large")]
    assert set(put(store, small, 65536, fill=3)) == {Status.OK}
    assert put(store, large, 2 * MIB) == [Status.OK]
    eventually(lambda: store.stats().tiers[1].objects == 49, COPIED_ALL)
    eventually(lambda: store.stats().pinned == 0, HELD_BY_NOBODY)
    store._pool.writer.call(lambda records: retract(records, small + large), time.monotonic() + 5)
    slots = [slot for nbytes in (4096, 65536) for slot in store.reserve(4096, nbytes, 10.0)]
    assert has(store, small) == [True] * 48
    values: list[list[int | None]] = []
    threads = [threading.Thread(target=lambda: values.append(get(store, small, 65536))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == [[3] * 48] * 2
    assert 0 < store._pool.disk.bounce.peak <= MIB
    memory = np.zeros((1, 2 * MIB), dtype=np.uint8)
    (result,) = store.get(batch(large, memory), 5.0).results()
    assert result.status is Status.NO_SPACE
    store.discard(slots)
    assert get(store, large, 2 * MIB) == [1]
    store.close()


def retract(records, keys) -> None:
    """Evict these objects from memory."""
    for one in keys:
        unit, _, nbytes, generation = records.entry(one)
        records.retract(one, unit, nbytes, generation, revivable=True)


def test_promoted_by_pin_and_by_a_ranged_reader(pool_root, ssd):
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    keys = [key(n) for n in range(4)]
    put(store, keys, fill=9)
    eventually(lambda: store.stats().tiers[1].objects == 4, COPIED_ALL)
    eventually(lambda: store._pool.peers.stamps(np.arange(64)).max() == 0, HELD_BY_NOBODY)
    store._pool.writer.call(lambda records: retract(records, keys), time.monotonic() + 5)
    assert {answer.tier for answer in store.exists(keys)} == {Tier.DISK}
    pins = store.pin(keys[:2])
    assert all(pins.addresses)
    store.unpin(pins)
    reader = store.begin_read([*keys[2:], key("none")], 5.0)
    assert [result.status for result in reader.results] == [Status.OK, Status.OK, Status.MISSING]
    assert [result.tier for result in reader.results[:2]] == [Tier.DISK] * 2
    target = np.zeros((2, 100), dtype=np.uint8)
    addresses = target.ctypes.data + np.arange(2, dtype=np.int64)[:, None] * 100
    reader.read([0, 1], 50, addresses, np.array([100], dtype=np.int64))
    assert (target == 9).all()
    reader.end()
    assert {answer.tier for answer in store.exists(keys)} == {Tier.DRAM}
    assert store.verify() == []
    store.close()


def test_a_put_of_what_the_disk_has_exists(pool_root, ssd):
    store = opened(pool_root, 8 * MIB, disk=settings(ssd))
    put(store, [key(1)], fill=4)
    eventually(lambda: store.stats().tiers[1].objects == 1, COPIED_ALL)
    eventually(lambda: store._pool.peers.stamps(np.arange(64)).max() == 0, HELD_BY_NOBODY)
    store._pool.writer.call(lambda records: retract(records, [key(1)]), time.monotonic() + 5)
    assert put(store, [key(1), key(2)], fill=5) == [Status.EXISTS, Status.OK]
    assert get(store, [key(1), key(2)]) == [4, 5]
    store.close()


def test_without_o_direct_the_page_cache_is_used(pool_root, tmp_path, caplog):
    caplog.set_level("INFO")
    with mounted(tmp_path / "disk", "ramfs") as folder:
        store = opened(pool_root, 8 * MIB, disk=settings(folder))
        put(store, [key(1)], fill=4)
        eventually(lambda: store.stats().tiers[1].objects == 1, COPIED_ALL)
        assert store.verify() == []
        store.close()
