"""The reader table and the write lock by themselves."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.stores.local import fence, readers
from kvpool.stores.local.readers import ROWS, SLOTS, TABLE_BYTES, Readers
from kvpool.stores.local.write_lock import Abandoned, WriteLock


class FakeLmdb:
    """Begins transactions with the numbers it is told, the last one for ever, and looks at the slot of the reader at each."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.table: Readers | None = None
        self.log: list[object] = []
        self.open = 0

    def begin(self):
        number = self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]
        self.log.append(("begin", number, int(self.table._slots.max()) if self.table else 0))
        self.open += 1
        return FakeTransaction(self, number)

    def fence(self) -> None:
        self.log.append("fence")

    def info(self):
        return {"last_txnid": self.numbers[0]}


class FakeTransaction:
    def __init__(self, env: FakeLmdb, number: int) -> None:
        self.env, self.number = env, number

    def id(self) -> int:
        return self.number

    def abort(self) -> None:
        self.env.open -= 1


@pytest.fixture
def path(pool_root):
    path = pool_root / "readers"
    path.write_bytes(bytes(TABLE_BYTES))
    return path


@pytest.fixture
def table(path):
    made = []

    def join(lmdb: FakeLmdb | None = None) -> Readers:
        fds = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2)]
        made.append(Readers(*fds, lmdb.fence if lmdb else fence.make_fence()))
        if lmdb is not None:
            lmdb.table = made[-1]
        return made[-1]

    yield join
    for one in made:
        one.close()


def test_a_snapshot_that_is_known_costs_one_begin_and_no_fence(table):
    lmdb = FakeLmdb(7)
    mine = table(lmdb)
    mine.committed(7)
    assert mine.read(lmdb, lambda txn: (txn.id(), mine._slots.max())) == (7, 9)
    assert lmdb.log == [("begin", 7, 8)]
    assert not mine._slots.any()


@pytest.mark.parametrize("seen", [(9,), (511, 258), (8, 9, 9), (0x1FF, 0x101, 0x102)])
def test_a_new_number_counts_when_it_is_seen_on_both_sides_of_a_fence(table, seen):
    """Also when the first ones are half-written."""
    lmdb = FakeLmdb(*seen)
    mine = table(lmdb)
    mine.committed(5)
    assert mine.read(lmdb, lambda txn: txn.id()) == seen[-1]
    begins = [entry for entry in lmdb.log if entry != "fence"]
    assert lmdb.log[1::2] == ["fence"] * (len(begins) - 1)
    assert begins[-1][1] == begins[-2][1]
    assert {allowed for _, _, allowed in begins} == {6}, "it allows no more than it knows"
    assert lmdb.open == 0
    mine.read(lmdb, lambda txn: None)
    assert len([entry for entry in lmdb.log if entry != "fence"]) == len(begins) + 1


def test_a_read_that_fails_forbids_nothing(table):
    lmdb, one, other = FakeLmdb(3), table(), table()
    with pytest.raises(ZeroDivisionError):
        one.read(lmdb, lambda txn: 1 // 0)
    lmdb.begin = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        one.read(lmdb, lambda txn: None)
    assert not other.forbid(1 << 60)
    assert lmdb.open == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, SLOTS - 1), st.integers(0, 9)), max_size=12), st.integers(1, 9))
def test_forbid_looks_at_every_slot_of_the_living(tmp_path_factory, announced, number):
    path = tmp_path_factory.mktemp("table") / "readers"
    path.write_bytes(bytes(TABLE_BYTES))
    clients = [Readers(*(os.open(path, os.O_RDWR) for _ in range(2)), fence.make_fence()) for _ in range(3)]
    clients[2].leave()
    slots: dict[tuple[int, int], int] = {}
    for client, slot, value in announced:
        clients[client]._slots[slot] = slots[client, slot] = value
    expected = any(0 < value < number for (client, _), value in slots.items() if client != 2)
    assert clients[0].forbid(number) == clients[1].forbid(number) == expected
    for client in clients:
        client.close()


def test_a_row_of_a_dead_client_is_taken_over_empty(table):
    one, other = table(), table()
    one._slots[5] = 1
    row = one._row
    assert other.forbid(2)
    one.leave()
    assert not other.forbid(2)
    again = table()
    assert again._row == row
    assert not again._slots.any()
    assert {again._row, other._row} == {1, 2}


def test_a_forked_child_does_not_keep_the_row(table):
    one, other = table(), table()
    one._slots[0] = 1
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        one.leave()
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        time.sleep(0.1)
        assert other.forbid(5), "the parent has it still"
        one.leave()
        assert not other.forbid(5)
    finally:
        os.close(write)
        os.waitpid(pid, 0)


def test_the_table_and_a_clients_row_are_finite(table, monkeypatch):
    monkeypatch.setattr(readers, "_SLOT_S", 0.05)
    mine, lmdb, gate = table(), FakeLmdb(0), threading.Event()
    inside = threading.Barrier(SLOTS + 1)

    def look(txn):
        inside.wait(60)
        gate.wait(60)

    threads = [threading.Thread(target=mine.read, args=(lmdb, look)) for _ in range(SLOTS)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    with pytest.raises(OSError, match="64 reads") as caught:
        mine.read(lmdb, lambda txn: None)
    assert caught.value.errno == errno.EBUSY
    gate.set()
    for thread in threads:
        thread.join(60)
    assert mine.read(lmdb, lambda txn: 1) == 1
    for _ in range(ROWS - 2):
        table()
    with pytest.raises(OSError, match="511 clients"):
        table()


def lock_on(path: Path, lmdb: FakeLmdb, mine: Readers) -> WriteLock:
    return WriteLock(os.open(path, os.O_RDWR | os.O_CLOEXEC), lmdb, mine, lmdb.fence)


def test_the_writer_fences_on_both_sides_of_its_look(table, path):
    lmdb = FakeLmdb(4)
    mine = table()
    real, lmdb.log = mine.forbid, []
    mine.forbid = lambda number: bool(lmdb.log.append(("look", number))) or real(number)  # type: ignore[method-assign]
    lock = lock_on(path, lmdb, mine)
    with lock.held() as number:
        assert number == 5
        assert lmdb.log == ["fence", ("look", 5), "fence"]
        lmdb.numbers = [5]
    assert mine._known == 5
    lock.close()


def test_the_writer_waits_for_reads_that_forbid_its_transaction(table, path):
    lmdb, mine, other = FakeLmdb(4), table(), table()
    lock = lock_on(path, lmdb, mine)
    other._slots[3] = 4
    asked: list[float] = []
    with pytest.raises(Abandoned, match="enough"), lock.held(lambda waited: asked.append(waited) or "enough" * (waited > 0.1)):  # type: ignore[func-returns-value]
        pass
    assert 0.1 < asked[-1] < 20
    before = time.monotonic()
    threading.Timer(0.1, lambda: np.copyto(other._slots, 0)).start()
    with lock.held():
        assert 0.1 <= time.monotonic() - before < 20
    lock.close()


def test_one_writer_at_a_time(table, path):
    lmdb, mine = FakeLmdb(4), table()
    locks = [lock_on(path, lmdb, mine) for _ in range(2)]
    inside, most = [], []

    def write(lock: WriteLock) -> None:
        for _ in range(50):
            with lock.held():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0002)
                inside.pop()

    threads = [threading.Thread(target=write, args=(lock,)) for lock in (*locks, locks[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(most), max(most)) == (150, 1)
    for lock in locks:
        lock.close()


def test_the_lock_of_a_killed_writer_is_free(table, path):
    script = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    lock, outcome = lock_on(path, FakeLmdb(4), table()), []

    def write() -> None:
        with lock.held() as number:
            outcome.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join(0.2)
    assert not outcome
    other.kill()
    other.communicate()
    thread.join(60)
    assert outcome == [5]
    lock.close()


def test_the_cheap_fence_of_readers():
    fence.reader_fence("x86_64")()
    fence.reader_fence("aarch64")()
    assert fence.reader_fence("aarch64") is not fence.reader_fence("x86_64")


def test_the_index_is_of_the_kind_that_the_protocol_knows(pool_root):
    """Whatever the environment says."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.unit.stores.helpers import key, opened, put\n"
        "store = opened(Path(sys.argv[1]), 262144)\n"
        "assert put(store, [key('a')])[0].value == 'ok'\n"
        "env = store._pool.environment.env\n"
        "print(env.flags()['lock'], *(env.lib_version()[:2] if hasattr(env, 'lib_version') else (0, 9)))\n"
        "store.close()\n"
    )
    environment = {**os.environ, "LMDB_DEFAULT_LIB_VERSION": "1"}
    command = [sys.executable, "-c", script, str(pool_root)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "False 0 9\n", run.stdout + run.stderr


def test_nobody_reads_by_a_row_that_was_let_go_of(table):
    """It may be another client's by then: a read would end the announcement of one of its own."""
    mine, lmdb = table(), FakeLmdb(0)
    mine.leave()
    other = table()
    assert other._row == mine._row
    with pytest.raises(OSError, match="closed"):
        mine.read(lmdb, lambda txn: None)
    assert lmdb.log == []
