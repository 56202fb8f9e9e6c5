"""Each transfer engine against a real other process: bytes arrive whole, and what cannot be reached says so."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvpool.stores.base import Batch, Status
from kvpool.transfer import EngineSettings, build_engine
from kvpool.transfer.base import Runs
from kvpool.transfer.engines.process_vm import Address

HELPER = Path(__file__).with_name("engine_peer.py")
NBYTES = 1 << 20


class Peer:
    """A process that holds ``NBYTES`` of known bytes at ``base`` and answers to ``address``."""

    def __init__(self, engine: str, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HELPER), engine, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        words = next(line for line in lines if line.startswith("peer ")).split()
        self.base, self.address = int(words[1]), bytes.fromhex(words[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def peer(pool_root):
    peers = []

    def start(engine):
        peers.append(Peer(engine, pool_root))
        return peers[-1]

    yield start
    for one in peers:
        one.kill()


def right_bytes():
    return np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


def settings(root, producer=False):
    return EngineSettings("127.0.0.1", producer, root=root, buffer_bytes=8 << 20)


def runs_of(base, target, pieces):
    offsets = np.array([o for o, _ in pieces], dtype=np.int64)
    return Runs(offsets + base, offsets + target.ctypes.data, np.array([n for _, n in pieces], dtype=np.int64))


@pytest.mark.parametrize("name", ["process_vm", "mooncake"])
def test_one_sided_engines_read_exactly_what_is_asked(name, peer, pool_root):
    if name == "mooncake":
        pytest.importorskip("mooncake.engine")
    other, engine = peer(name), build_engine(name, settings(pool_root))
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.open([(target.ctypes.data, NBYTES)])
    assert engine.reach(other.address) == ""
    pieces = [(0, 100), (4096, 65536), (NBYTES - 7, 7)] + [(200_000 + 64 * i, 32) for i in range(3000)]
    result = engine.read(other.address, runs_of(other.base, target, pieces), 10.0)
    assert (result.status, result.nbytes) == (Status.OK, sum(n for _, n in pieces))
    expected, right = np.zeros(NBYTES, dtype=np.uint8), right_bytes()
    for offset, size in pieces:
        expected[offset : offset + size] = right[offset : offset + size]
    assert (target == expected).all()
    assert engine.read(other.address, runs_of(other.base, target, pieces), -1.0).status is Status.TRANSIENT
    other.kill()
    assert engine.read(other.address, runs_of(other.base, target, pieces), 10.0).status is Status.FATAL
    assert engine.reach(other.address) != ""
    engine.close()


def test_process_vm_tells_another_process_from_the_peer(peer, pool_root):
    other, engine = peer("process_vm"), build_engine("process_vm", settings(pool_root))
    real = msgspec.msgpack.decode(other.address, type=Address)
    wrong = msgspec.msgpack.encode(Address(real.pid, real.at, bytes(32)))
    assert "is not prefill's worker" in engine.reach(wrong)
    unmapped = msgspec.msgpack.encode(Address(real.pid, 8, real.token))
    assert "use transfer_engine local_host" in engine.reach(unmapped)


def test_process_vm_needs_host_memory(pool_root):
    with pytest.raises(ValueError, match="process_vm reaches host memory only"):
        build_engine("process_vm", EngineSettings("127.0.0.1", False, device="npu"))


def test_local_host_moves_objects_and_forgets_them(peer, pool_root):
    other, engine = peer("local_host"), build_engine("local_host", settings(pool_root))
    engine.open([])
    batch = Batch([b"k0", b"k1"], *target_of(2))
    assert engine.fetch(batch, 1.0).status is Status.FATAL, "not reached yet"
    assert engine.reach(other.address) == ""
    target = np.zeros(2000, dtype=np.uint8)
    addresses = target.ctypes.data + np.array([[0, 600], [1000, 1600]])
    assert engine.fetch(Batch([b"k0", b"k1"], addresses, np.array([600, 400])), 5.0).status is Status.OK
    assert (target == right_bytes()[:2000]).all()
    assert engine.fetch(Batch([b"gone"], addresses[:1], np.array([600, 400])), 5.0).status is Status.MISSING
    engine.close()


def test_local_host_refuses_what_would_push_out_unread_transfers(pool_root):
    """A full buffer: the new one finds no room, the old ones stay whole; withdrawn, or their time up, they make room."""
    producer = build_engine("local_host", replace(settings(pool_root, producer=True), hold_s=600.0))
    reader = build_engine("local_host", settings(pool_root))
    producer.open([])
    reader.open([])
    assert reader.reach(producer.address()) == ""
    data = np.random.default_rng(1).integers(0, 256, (64, NBYTES), dtype=np.uint8)

    def of(number, memory):
        return Batch([b"k%d" % number], np.array([[memory.ctypes.data]]), np.array([NBYTES]))

    accepted, refused = [], None
    for number in range(64):
        result = producer.publish(f"t{number}", of(number, data[number]), 5.0)
        if result.status is not Status.OK:
            refused = number
            break
        accepted.append(number)
    assert refused is not None, "64 MB went into 8 MB"
    assert result.status is Status.NO_SPACE
    assert len(accepted) >= 4
    seen = np.zeros(NBYTES, dtype=np.uint8)
    for number in accepted:
        assert reader.fetch(of(number, seen), 5.0).status is Status.OK
        assert (seen == data[number]).all()
    assert reader.fetch(of(refused, seen), 5.0).status is Status.MISSING
    producer.withdraw("t0")
    producer.withdraw("t0")
    assert reader.fetch(of(0, seen), 5.0).status is Status.MISSING
    assert producer.publish("again", of(refused, data[refused]), 5.0).status is Status.OK
    assert reader.fetch(of(refused, seen), 5.0).status is Status.OK
    assert (seen == data[refused]).all()
    reader.close()
    producer.close()


def test_local_host_forgets_what_nobody_withdraws(pool_root):
    producer = build_engine("local_host", replace(settings(pool_root, producer=True), hold_s=0.05))
    producer.open([])
    data = np.zeros(NBYTES, dtype=np.uint8)
    batches = [Batch([b"k%d" % n], np.array([[data.ctypes.data]]), np.array([NBYTES])) for n in range(40)]
    for number, batch in enumerate(batches):
        assert producer.publish(f"t{number}", batch, 5.0).status is Status.OK
        time.sleep(0.06)
    assert len(producer._leases) == 1
    producer.close()


def target_of(count):
    memory = np.zeros(count * 8, dtype=np.uint8)
    return memory.ctypes.data + 8 * np.arange(count).reshape(-1, 1), np.array([8])


def test_local_host_refuses_another_pool(peer, pool_root, tmp_path):
    other = peer("local_host")
    elsewhere = build_engine("local_host", settings(tmp_path))
    assert "does not see prefill's shared memory" in elsewhere.reach(other.address)
    (tmp_path / "transfer").mkdir()
    assert "both must see one" in elsewhere.reach(other.address)


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="'warp' is unknown \\(accepted: local_host, process_vm, mooncake\\)"):
        build_engine("warp", EngineSettings("127.0.0.1", False))
