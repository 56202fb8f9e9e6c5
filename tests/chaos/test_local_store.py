"""The embedded store under kill -9, SIGSTOP and want of memory. Every byte that is read anywhere is verified."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.stores.base import Hit, Status
from kvpool.stores.local import LocalStore
from kvpool.stores.local.records import Records
from tests.chaos import store_worker as sw
from tests.waiting import eventually

WORKER = Path(sw.__file__)


class Process:
    """A worker process; killed at the end of the test whatever happens."""

    alive: list["Process"] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, role: str, root: Path, seed: int, prefix: tuple[str, ...] = (), wanted: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, str(WORKER), role, str(root), str(seed), *wanted]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        Process.alive.append(self)

    def line(self) -> str:
        return self.process.stdout.readline().strip()  # type: ignore[union-attr]

    def says(self, word: str) -> "Process":
        while (line := self.line()).startswith("pool "):
            pass  # a warning that some tests provoke
        assert line == word, line + self.process.communicate()[0]
        return self

    def ready(self) -> "Process":
        return self.says("ready")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        output, _ = self.process.communicate(timeout=30)
        assert "WRONG" not in output, output
        assert "Traceback" not in output, output

    def finish(self) -> dict[str, int]:
        """The end of its input is the end of its work."""
        output, _ = self.process.communicate(timeout=250)
        assert self.process.returncode == 0, output
        return json.loads(output.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    for process in Process.alive:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()
    Process.alive.clear()


@pytest.fixture
def store(pool_root):
    store = sw.open_store(str(pool_root))
    yield store
    store.close()


def layout(store: LocalStore, records: Records, nbytes: int) -> tuple[int, int]:
    """Slots that slabs of this class have, and the longest run of chunks that belong to none of them."""
    pool = store._pool
    slabs = records.slabs.of_class(nbytes)
    mine = {slab.chunk + place for slab in slabs for place in range(slab.chunks)}
    longest = run = 0
    for chunk in range(pool.allocator.limit(records)):
        run = 0 if chunk in mine else run + 1
        longest = max(longest, run)
    return sum(slab.slots for slab in slabs), longest


def settled(store: LocalStore) -> None:
    """Nothing is leaked: the books are right, and when all is removed every slot can be reserved again."""
    assert store.verify() == []
    eventually(lambda: not store.stats().leases, "the leases that a worker left have run out")
    store.clear(b"")
    nbytes = sw.CLASSES[0]
    slots = store.reserve(1 << 12, nbytes, 30.0)
    room, gap = store._pool.look(lambda records: layout(store, records, nbytes))
    assert len(slots) == room > 0, f"{len(slots)} of {room} slots can be reserved: {store.stats()}"
    assert gap < store._pool.geometry.slab_chunks(nbytes), f"{gap} chunks in a row hold nothing of this class"
    store.discard(slots)
    store.remove([b"after the discard"])  # queued behind it
    assert (store.stats().writing, store.stats().used_bytes) == (0, 0)
    assert store.verify() == []


def test_kill_9_under_load_loses_nothing_and_leaks_nothing(store, pool_root):
    chance = random.Random(11)
    steady = [Process("work", pool_root, seed).ready() for seed in (1, 2)]
    kills, end = 0, time.monotonic() + 18
    while kills < 8 or (time.monotonic() < end and kills < 60):
        victim = Process("work", pool_root, 1000 + kills)
        victim.ready()
        time.sleep(chance.random() * 0.25)
        victim.kill()
        kills += 1
    for process in steady:
        process.finish()  # having stored and found many
    settled(store)


def test_kill_9_of_forked_writers_hundreds_of_times(pool_root):
    """Processes forked before the pool is opened start in milliseconds, so that many can be killed at random instants."""
    script = (
        "import os, random, signal, sys, time\n"
        "from tests.chaos import store_worker as sw\n"
        "root, kills = sys.argv[1], int(sys.argv[2])\n"
        "chance = random.Random(5)\n"
        "for turn in range(kills):\n"
        "    children = []\n"
        "    for child in range(2):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            worker = sw.Worker(sw.open_store(root), turn * 2 + child)\n"
        "            while True: worker.turn()\n"
        "        children.append(pid)\n"
        "    time.sleep(0.02 + chance.random() * 0.12)\n"
        "    for pid in children:\n"
        "        os.kill(pid, signal.SIGKILL)\n"
        "        _, status = os.waitpid(pid, 0)\n"
        "        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status\n"
        "print('survived')\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", script, str(pool_root), "150"], capture_output=True, text=True, cwd=root, timeout=280, check=False
    )
    assert run.stdout.strip() == "survived", run.stdout + run.stderr
    store = sw.open_store(str(pool_root))
    worker = sw.Worker(store, 1)
    for start in range(0, sw.KEYS, 4):
        for nbytes in sw.CLASSES:
            worker.get(list(range(start, start + 4)), nbytes)
    settled(store)
    store.close()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL], ids=["continued", "killed"])
def test_bc_112_writer_stopped_inside_a_transaction_blocks_nobody(store, pool_root, end):
    worker = sw.Worker(store, 3)
    mine = [9000, 9001, 9002, 9003]  # no worker process writes or removes these
    worker.put(mine, sw.CLASSES[0])
    kept = store.lease([sw.key(number, sw.CLASSES[0]) for number in mine], 600.0)
    Process("work", pool_root, 4).ready()
    stopped = Process("stop-in-write", pool_root, 5).ready().says("inside")
    memory = np.stack([sw.content(number, sw.CLASSES[1]) for number in mine])
    before = time.monotonic()
    results = store.put(sw.batch(mine, memory, sw.CLASSES[1]), 0.5).results()
    took = time.monotonic() - before
    assert {result.status for result in results} == {Status.TRANSIENT}
    assert took < 10, f"a put with a deadline of 0.5 s took {took:.1f} s"
    worker.get(mine, sw.CLASSES[0])
    assert worker.counts["hit"] == 4
    lease = store.lease([sw.key(9000, sw.CLASSES[0])], 5.0)
    assert isinstance(lease.answers[0], Hit)
    store.release(lease)
    Process("work", pool_root, 6).ready()  # joining does not hang either
    stopped.signal(end)
    results = store.put(sw.batch(mine, memory, sw.CLASSES[1]), 60.0).results()
    assert all(result.stored for result in results), results
    if end == signal.SIGCONT:
        stopped.finish()
    for process in Process.alive:
        if process is not stopped:
            process.kill()
    store.release(kept)
    settled(store)


def test_reader_stopped_in_mid_copy_never_sees_a_reused_slot(store, pool_root):
    """The copy is stretched: after each segment the process stops itself while this one evicts everything it can."""
    script = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from tests.chaos import store_worker as sw\n"
        "from kvpool.devices import CpuCopyEngine\n"
        "from kvpool.stores.local import LocalStore\n"
        "from pathlib import Path\n"
        "class Slow(CpuCopyEngine):\n"
        "    def copy(self, targets, sources, sizes, **side):\n"
        "        half = len(sizes) // 2\n"
        "        super().copy(targets[:half], sources[:half], sizes[:half], **side)\n"
        "        print('half', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "        super().copy(targets[half:], sources[half:], sizes[half:], **side)\n"
        "store = LocalStore(Path(sys.argv[1]), 'chaos', sw.POOL_BYTES, engine=Slow())\n"
        "store.open()\n"
        "worker = sw.Worker(store, 1)\n"
        "print('ready', flush=True)\n"
        "for turn in range(5):\n"
        "    worker.get([0, 1, 2, 3], sw.CLASSES[0])\n"
        "store.close()\n"
        "print(worker.counts['hit'], flush=True)\n"
    )
    root = Path(__file__).parents[2]
    worker = sw.Worker(store, 7)
    worker.put([0, 1, 2, 3], sw.CLASSES[0])
    reader = subprocess.Popen([sys.executable, "-c", script, str(pool_root)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for turn in range(5):
        assert reader.stdout.readline() == "half\n"
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
        if turn % 2:
            store.remove([sw.key(number, sw.CLASSES[0]) for number in range(4)])
        for nbytes in sw.CLASSES:
            for start in range(4, sw.KEYS, 4):
                worker.put(list(range(start, start + 4)), nbytes)
        if turn % 2:
            worker.put([0, 1, 2, 3], sw.CLASSES[0])
        assert store.verify() == []
        os.kill(reader.pid, signal.SIGCONT)
    output, _ = reader.communicate(timeout=120)
    assert reader.returncode == 0, output
    assert output == "20\n"
    settled(store)


def test_full_arena_answers_no_space_and_recovers(store):
    nbytes = sw.CLASSES[0]
    slots = store.reserve(1 << 12, nbytes, 10.0)
    worker = sw.Worker(store, 8)
    for size in sw.CLASSES:
        worker.put([0, 1, 2, 3], size)
    assert worker.counts["no_space"] >= 8
    assert worker.counts["transient"] == 0
    store.discard(slots)
    for size in sw.CLASSES:
        worker.put([0, 1, 2, 3], size)
        worker.get([0, 1, 2, 3], size)
    assert worker.counts["hit"] == 12
    settled(store)


def test_one_of_two_processes_is_killed(store, pool_root):
    other = Process("work", pool_root, 21).ready()
    worker = sw.Worker(store, 22)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        worker.turn()
    other.kill()
    for start in range(0, sw.KEYS, 4):
        worker.put(list(range(start, start + 4)), sw.CLASSES[2])
    assert worker.counts["transient"] == 0
    settled(store)


def test_dead_writers_key_is_taken_over(store, pool_root):
    script = (
        "import os, signal, sys\n"
        "from tests.chaos import store_worker as sw\n"
        "writer = sw.open_store(sys.argv[1]).begin_write([sw.key(0, sw.CLASSES[0])], sw.CLASSES[0], 5.0)\n"
        "print(writer.results[0].status.name, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    root = Path(__file__).parents[2]
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(pool_root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "OK\n"
    worker = sw.Worker(store, 23)
    worker.put([0], sw.CLASSES[0])
    assert worker.counts["busy"] == 1
    other.kill()
    other.communicate()
    worker.put([0], sw.CLASSES[0])
    assert worker.counts["put"] == 1
    assert store.stats().writing == 0
    settled(store)


def test_threads_of_one_process_share_a_pool_with_another(store, pool_root):
    other = Process("work", pool_root, 41).ready()
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            worker = sw.Worker(store, seed)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                worker.turn()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    other.finish()
    settled(store)
