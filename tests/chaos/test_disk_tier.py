"""The disk tier over restarts, under kill -9 and with several users. Every byte that is read is verified."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from kvpool.stores.base import Tier
from tests.chaos import disk_worker as dw
from tests.chaos import store_worker as sw
from tests.chaos.disk_moves import SIZE, get, on_disk, put, spilled, tiers, wiped
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def test_a_working_set_larger_than_memory(pool_root, ssd):
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    seen = tiers(store, numbers)
    assert None not in seen
    assert seen.count(Tier.DISK) > 20
    for _ in range(3):
        assert get(store, numbers) == len(numbers)
    assert store.verify() == []
    store.close()


def test_everything_comes_back_after_a_wipe_of_memory(pool_root, ssd):
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store, 40)
    on_disk(store, 30)
    assert store._pool.disk.demoter.close(60.0), "what is being copied now would count later only"
    before = store.stats().tiers[1]
    kept = [n for n, raw in zip(numbers, store._pool.disk.books.entries([sw.key(n, SIZE) for n in numbers])) if raw]
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd))
    assert tiers(store, kept) == [Tier.DISK] * len(kept)
    after = store.stats().tiers[1]
    assert (after.objects, after.used_bytes) == (before.objects, before.used_bytes)
    assert after.written_bytes >= before.written_bytes > 0, "wear is counted over restarts"
    assert get(store, kept) == len(kept)
    assert store.verify() == []
    store.close()


def test_a_restart_without_a_wipe_reads_no_records(pool_root, ssd, monkeypatch):
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    store.close()
    monkeypatch.setattr("kvpool.stores.local.disk.attach.scan", None)
    store = dw.open_store(str(pool_root), str(ssd))
    assert get(store, numbers) == len(numbers)
    store.close()


KILLS = """
import os, random, signal, sys, time
from tests.chaos import disk_worker as dw, store_worker as sw
root, ssd, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(5)
for turn in range(kills):
    begun, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dw.open_store(root, ssd)
        worker = sw.Worker(store, turn)
        os.write(told, b"x")
        while True: worker.turn()
    os.close(told)
    if turn % 2:
        os.read(begun, 1)  # however slow the machine is, half of them are killed at work
    time.sleep(0.03 + chance.random() * 0.12)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status
    os.close(begun)
print("killed", kills)
"""


def run(script, *arguments, timeout=240):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout + done.stderr
    return done.stdout


def test_kill_9_under_load_hundreds_of_times(pool_root, ssd):
    assert "killed 250" in run(KILLS, pool_root, ssd, 250)
    store = dw.open_store(str(pool_root), str(ssd))
    assert store.stats().tiers[1].objects > 0
    for nbytes in sw.CLASSES:
        numbers = list(range(sw.KEYS))
        present = [n for n, where in zip(numbers, tiers(store, numbers, nbytes)) if where]
        assert get(store, present[:40], nbytes) >= len(present[:40]) // 2, "some may be evicted while others are promoted"
    assert store.stats().tiers[1].errors == 0, "not one bad checksum"
    assert store.verify() == []
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd))
    for nbytes in sw.CLASSES:
        get(store, list(range(sw.KEYS)), nbytes)
    assert store.stats().tiers[1].errors == 0, "every record that a kill left was true"
    assert store.verify() == []
    store.close()


MID_DEMOTION = """
import os, sys
from tests.chaos import disk_worker as dw, store_worker as sw
root, ssd, first, kills = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
whole = 0
for turn in range(first, first + kills):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        from kvpool.stores.local.disk.files import DiskFiles
        names = ("clear_record", "write_data", "write_record")
        real = {name: getattr(DiskFiles, name) for name in names}
        left = [turn % 23]
        def stepping(name):
            def call(self, *arguments):
                if left[0] == 0 and name == "write_data":
                    offset, address, nbytes = arguments
                    real[name](self, offset, address, max(4096, nbytes // 2 // 4096 * 4096))
                if left[0] == 0:
                    os.write(told, b"x")
                    os.kill(os.getpid(), 9)
                left[0] -= 1
                return real[name](self, *arguments)
            return call
        for name in names: setattr(DiskFiles, name, stepping(name))
        store = dw.open_store(root, ssd, dram_high=2, dram_low=1)
        sw.Worker(store, turn).put(list(range(turn * 8, turn * 8 + 8)), sw.CLASSES[2])
        os.write(told, b"p")
        import time
        time.sleep(60)
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    said = os.read(ready, 2)
    assert os.WIFSIGNALED(status) and b"x" in said, (turn, status, said)
    store = dw.open_store(root, ssd, dram_high=2, dram_low=1)
    worker = sw.Worker(store, 1)
    worker.get(list(range(turn * 8, turn * 8 + 8)), sw.CLASSES[2])
    assert worker.counts["hit"] == 8 or b"p" not in said, (turn, worker.counts)
    whole += worker.counts["hit"] == 8
    assert store.stats().tiers[1].errors == 0
    store.close()
    os.close(ready); os.close(told)
print("survived", kills, "whole", whole)
"""


def test_kill_9_in_the_middle_of_a_demotion_loses_nothing_published(pool_root, ssd):
    """Killed at each step of writing to the disk in turn, once in the middle of the data: all that was published is there."""
    published = 0
    for start in range(0, 115, 23):
        survived, whole = run(MID_DEMOTION, pool_root, ssd, start, 23).split()[1::2]
        assert int(survived) == 23
        published += int(whole)
    assert published > 50, "most were killed before there was anything to lose"
    eager = {"dram_high": 2, "dram_low": 1}
    store = dw.open_store(str(pool_root), str(ssd), **eager)
    assert store.verify() == []
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd), **eager)
    numbers = [n for n, where in zip(range(920), tiers(store, range(920))) if where]
    assert len(numbers) > 20
    assert get(store, numbers) == len(numbers)
    assert store.stats().tiers[1].errors == 0
    store.close()


def test_two_processes_share_the_tier(pool_root, ssd):
    store = dw.open_store(str(pool_root), str(ssd))
    command = [sys.executable, "-m", "tests.chaos.disk_worker", str(pool_root), str(ssd), "7"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        worker = sw.Worker(store, 8)
        worker.take_turns(5, over=lambda: store.stats().tiers[1].objects > 20)
        output, _ = other.communicate(timeout=250)
    assert other.returncode == 0, output
    assert "Traceback" not in output
    stats = store.stats().tiers[1]
    assert (stats.errors, stats.ok) == (0, True)
    assert store.verify() == []
    store.close()


def test_another_process_takes_over_when_the_demoter_dies(pool_root, ssd):
    script = "import sys, time\nfrom tests.chaos import disk_worker as dw\nfrom tests.chaos import store_worker as sw\n"
    script += (
        "store = dw.open_store(*sys.argv[1:])\nsw.Worker(store, 1).put([0], 4096)\n"
        "while not store._pool.disk.demoter.elected: time.sleep(0.02)\n"
        "print('elected', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, pool_root, ssd], stdout=subprocess.PIPE, text=True, cwd=ROOT) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "elected\n"
        store = dw.open_store(str(pool_root), str(ssd))
        put(store, [0])
        time.sleep(0.7)
        assert store._pool.disk.demoter.elected is False
        first.kill()
    put(store, list(range(1, 41)))
    on_disk(store, 20)
    assert store._pool.disk.demoter.elected
    store.close()


def test_removed_objects_stay_removed_after_a_reboot(pool_root, ssd):
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    gone = numbers[::3]
    store.remove([sw.key(n, SIZE) for n in gone])
    assert tiers(store, gone) == [None] * len(gone)
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd))
    assert tiers(store, gone) == [None] * len(gone)
    assert get(store, [n for n in numbers if n not in gone]) >= 40
    store.close()


def test_clear_while_both_ways_are_busy(pool_root, ssd):
    """What is removed while it is copied up and down must not come back."""
    store = dw.open_store(str(pool_root), str(ssd))
    numbers = spilled(store)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            get(store, numbers)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(10):
            store.clear(b"")
            assert tiers(store, numbers) == [None] * len(numbers)
            sw.Worker(store, 1).put(numbers[:40], SIZE)
    finally:
        stop.set()
        reader.join(120)
    assert not reader.is_alive()
    assert store.verify() == []
    store.close()


def test_random_work_on_a_small_disk(pool_root, ssd):
    """Eviction from the disk, classes that take slabs from one another, promotion under pressure: the books stay right."""
    store = dw.open_store(str(pool_root), str(ssd), dram=6 << 20, nbytes=16 << 20)
    workers = [sw.Worker(store, seed) for seed in range(3)]
    full = threading.Event()

    def work(worker: sw.Worker) -> None:
        worker.take_turns(8, over=full.is_set)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: store.stats().tiers[1].evicted_objects > 20, "the disk is full and evicts", 120)
    finally:
        full.set()
        for thread in threads:
            thread.join(120)
    stats = store.stats().tiers[1]
    assert stats.errors == 0, stats
    assert store.verify() == []
    wiped(store, pool_root)
    store = dw.open_store(str(pool_root), str(ssd), dram=6 << 20, nbytes=16 << 20)
    for nbytes in sw.CLASSES:
        get(store, list(range(sw.KEYS)), nbytes)
    assert store.stats().tiers[1].errors == 0
    assert store.verify() == []
    store.close()
