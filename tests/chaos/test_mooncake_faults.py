"""Mooncake with its processes killed, stopped, full and with damaged disks. Every byte that is read is verified, no call hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool.ops.services.ports import free_port
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.stores.base import UNKNOWN, Hit, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore, connect
from tests.stores.mooncake_pool import MIB, QUICK, batch_of, content, get, key, mooncake_pool, put, statuses
from tests.stores.needs import needs_mooncake
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
LONGEST_CALL_S = 20.0  # the library itself waits 4 s for a master that is gone


@pytest.fixture
def pool(tmp_path):
    needs_mooncake()
    with mooncake_pool(tmp_path / "service") as started:
        yield started


def found(store, names):
    return [isinstance(answer, Hit) for answer in store.exists([key(name) for name in names])]


def test_master_killed_under_load_and_started_again(pool):
    store, stop, longest, seen = pool.open(), threading.Event(), [0.0], set()
    names = [f"load-{i}" for i in range(6)]
    put(store, names)

    def load() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            seen.update(statuses(get(store, names, deadline_s=2.0)))
            seen.update(statuses(put(store, names, deadline_s=2.0)))
            longest[0] = max(longest[0], (time.monotonic() - begun) / 2)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    pool.signal("master", signal.SIGKILL)
    eventually(lambda: not store.health().ok, "the probe sees that the master is down")
    begun = time.monotonic()
    answers = store.exists([key(name) for name in names])
    assert answers == [UNKNOWN] * 6, "a lookup that cannot tell says so"
    assert time.monotonic() - begun < 10
    time.sleep(1.0)
    stop.set()
    for thread in threads:
        thread.join(90)
    assert longest[0] < LONGEST_CALL_S
    assert Status.OK in seen
    assert seen <= {Status.OK, Status.EXISTS, Status.TRANSIENT, Status.MISSING}
    pool.restart("master")
    eventually(lambda: store.health().ok, "the probe sees that the master is back")
    eventually(
        lambda: statuses(put(store, ["again"])) == [Status.OK] or found(store, ["again"]) == [True], "the pool has memory again"
    )
    assert statuses(get(store, ["again"])) == [Status.OK]
    assert found(store, names) == [False] * 6, "the master forgets what was in memory"


def test_master_stopped_and_continued(pool):
    store = pool.open()
    put(store, ["a"])
    pool.signal("master", signal.SIGSTOP)
    begun = time.monotonic()
    assert store.exists([key("a")]) == [UNKNOWN]
    assert time.monotonic() - begun < 10
    memory = np.zeros((1, MIB), dtype=np.uint8)
    handle = store.get(batch_of(["a"], memory), 1.0)
    assert not handle.wait(1.0), "the deadline ends the wait"
    assert not handle.abandon(), "and not the call, which may still write"
    with pytest.raises(ValueError, match="not done"):
        handle.results()
    pool.signal("master", signal.SIGCONT)
    assert handle.wait(90), "the call ends when the master goes on"
    eventually(lambda: store.health().ok and statuses(put(store, ["b"]))[0] in (Status.OK, Status.EXISTS), "all is well again")
    eventually(lambda: statuses(get(store, ["b"])) == [Status.OK], "and can be read")


def test_owner_killed_and_started_again(pool):
    store = pool.open()
    put(store, ["gone"])
    pool.signal("owner", signal.SIGKILL)
    assert statuses(get(store, ["gone"])) != [Status.OK]
    assert statuses(put(store, ["none"], deadline_s=1.0)) != [Status.OK]
    eventually(lambda: found(store, ["gone"]) == [False], "the master forgets the owner after client_ttl")
    pool.restart("owner")
    eventually(lambda: statuses(put(store, ["new"]))[0] in (Status.OK, Status.EXISTS), "there is memory again")
    assert statuses(get(store, ["new"])) == [Status.OK]


def test_bc_089_owner_stopped_longer_than_its_ttl(pool):
    store = pool.open()
    put(store, ["before"])
    pool.signal("owner", signal.SIGSTOP)
    eventually(lambda: found(store, ["before"]) == [False], "the master takes it for dead")
    pool.signal("owner", signal.SIGCONT)
    eventually(lambda: statuses(put(store, ["after"]))[0] in (Status.OK, Status.EXISTS), "it is back by itself")
    for turn in range(20):
        assert statuses(put(store, [f"turn-{turn}"], 4096)) == [Status.OK]
        assert statuses(get(store, [f"turn-{turn}"], 4096)) == [Status.OK]


HALF_WRITER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from tests.stores.mooncake_pool import *
store = MooncakeStore(read_mooncake(open(sys.argv[1]).read(), "f", {}, UNKNOWN).options, StoreContext(role="tool"))
store.open()
assert store.begin_write([key("half")], MIB, 10.0).results[0].status is Status.OK
print("begun", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def patient(tmp_path):
    """It discards what was half written so late that all can be seen before."""
    needs_mooncake()
    with mooncake_pool(tmp_path / "service", master=replace(QUICK, discard_s=10)) as started:
        yield started


def test_a_key_half_written_by_a_dead_writer(patient):
    store = patient.open()
    path = patient.started.env["MOONCAKE_CONFIG_PATH"]
    done = subprocess.run([sys.executable, "-c", HALF_WRITER, path, str(ROOT)], capture_output=True, text=True, timeout=200)
    assert "begun" in done.stdout, done.stderr
    assert found(store, ["half"]) == [False]
    assert statuses(put(store, ["half"])) == [Status.BUSY], "the library says 0 here"
    assert statuses(get(store, ["half"])) == [Status.MISSING]
    assert statuses(store.begin_write([key("half")], MIB, 5.0).results) == [Status.BUSY]
    eventually(lambda: statuses(put(store, ["half"])) == [Status.OK], "it can be stored later")
    assert statuses(get(store, ["half"])) == [Status.OK]


def test_full_and_then_not(tmp_path):
    needs_mooncake()
    with mooncake_pool(tmp_path / "small", dram=32 * MIB) as small:
        store = small.open()
        for round_ in range(2):
            names = [f"full-{round_}-{i}" for i in range(36)]
            results = put(store, names, deadline_s=1.5)
            assert set(statuses(results)) <= {Status.OK, Status.NO_SPACE, Status.BUSY}  # BUSY: evicted before it could be confirmed
            kept = [name for name, result in zip(names, results, strict=True) if result.status is Status.OK]
            assert kept
            assert set(statuses(get(store, names))) <= {Status.OK, Status.MISSING}
            time.sleep(QUICK.lease_s)


def test_master_down_at_open():
    needs_mooncake()
    address = f"127.0.0.1:{free_port()}"
    store = _store(address)
    begun = time.monotonic()
    with pytest.raises(OSError, match=f"the Mooncake master at {address} cannot be reached"):
        store.open()
    assert time.monotonic() - begun < 20
    assert store.exists([key("a")]) == [UNKNOWN]


def test_master_that_does_not_answer_at_open(monkeypatch):
    """It takes the connection, and says nothing."""
    needs_mooncake()
    for name, value in {**connect.BOUNDS, "MC_RPC_TIMEOUT_MS": "1000"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = _store(f"127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"could not be set up .rank 0, master 127\.0\.0\.1:.*code -1"):
            store.open()
        assert time.monotonic() - begun < 20


def _store(address):
    options = MooncakeOptions(master_server_address=address, protocol="tcp", global_segment_size=0, local_buffer_size=16 * MIB)
    return MooncakeStore(options, StoreContext(role="tool"))


SSD_ENV = {
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(8 * MIB),
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 * MIB),
    "KVPOOL_MOONCAKE_CLIENT_TTL": str(QUICK.client_ttl_s),
}


def test_the_disk_keeps_what_was_written_and_a_bit_flip_is_caught(tmp_path, ssd):
    needs_mooncake()
    with mooncake_pool(tmp_path / "service", dram=32 * MIB, ssd=ssd, env=SSD_ENV) as pool:
        store = pool.open()
        names: list[str] = []

        def eight_on_disk() -> bool:
            new = [f"disk-{len(names) + i}" for i in range(8)]
            put(store, new, deadline_s=60.0)
            names.extend(new)
            time.sleep(0.5)
            return len(names) >= 56 and len(_on_disk(store, names)) >= 8

        eventually(eight_on_disk, "some objects are on the disk only", 120)
        target = _on_disk(store, names)
        assert statuses(get(store, target)) == [Status.OK] * len(target)
        assert _in_pieces(store, target[0]), "sessions cannot read what is on a disk only: it is read whole"
        flipped = [name for name in target[:4] if _flip(ssd, name)]
        assert flipped
        results = dict(zip(flipped, get(store, flipped), strict=True))
        assert {result.status for result in results.values()} == {Status.MISSING}
        assert found(store, flipped) == [False] * len(flipped), "they are removed"
        assert store.damaged_objects == len(flipped)
        assert statuses(put(store, flipped[:1], deadline_s=60.0)) == [Status.OK]
        assert statuses(get(store, flipped[:1])) == [Status.OK]
        pool.signal("owner", signal.SIGKILL)
        pool.restart("owner")
        eventually(lambda: set(target[4:]) <= set(_on_disk(store, target)), "what was on the disk is found again")
        assert statuses(get(store, target[4:])) == [Status.OK] * len(target[4:])


def _in_pieces(store, name):
    reader = store.begin_read([key(name)], 10.0)
    got = np.zeros(MIB, dtype=np.uint8)
    for start in (0, MIB // 2):
        place = np.array([[got.ctypes.data + start]], dtype=np.int64), np.array([MIB // 2], dtype=np.int64)
        assert statuses(reader.read([0], start, *place)) == [Status.OK], reader.results
    reader.end()
    return np.array_equal(got, content(name, MIB))


def _on_disk(store, names):
    answers = store.exists([key(name) for name in names])
    return [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, Hit) and answer.tier.value == "disk"][
        :8
    ]


def _flip(ssd, name):
    """Change one bit in the middle of this object, wherever it lies on the disk; False where it is not found."""
    mark = content(name, MIB)[MIB // 2 : MIB // 2 + 64].tobytes()
    for path in ssd.rglob("*"):
        if path.is_file() and (place := path.read_bytes().find(mark)) >= 0:
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
            return True
    return False
