"""Mooncake's engine over a library that, like the real one, may write on after it has answered an error."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvpool.stores.base import Status
from kvpool.transfer import EngineSettings, build_engine
from kvpool.transfer.base import Runs
from kvpool.transfer.engines import mooncake_te
from kvpool.transfer.engines.mooncake_te import Address

SOURCE = np.random.default_rng(3).integers(1, 256, 4096, dtype=np.uint8)


class Library:
    """``codes`` are the next answers; the entries of a failed call are written by ``write_late``."""

    def __init__(self):
        self.registered, self.codes, self.late, self.calls = [], [], [], []

    def initialize(self, *args):
        return 0

    def get_rpc_port(self):
        return 1

    def register_memory(self, address, nbytes):
        self.registered.append((address, nbytes))
        return 0

    def batch_transfer_sync_read(self, session, targets, sources, sizes):
        for target, size in zip(targets, sizes, strict=True):
            assert any(at <= target and target + size <= at + n for at, n in self.registered), "not registered memory"
        self.calls.append(list(zip(targets, sizes, strict=True)))
        code = self.codes.pop(0) if self.codes else 0
        moves = list(zip(targets, sources, sizes, strict=True))
        if code:
            self.late += moves
            return code
        for move in moves:
            ctypes.memmove(*move)
        return 0

    def write_late(self):
        for move in self.late:
            ctypes.memmove(*move)


@pytest.fixture
def engine(monkeypatch):
    library = Library()
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=lambda: library))
    monkeypatch.setattr(mooncake_te.MooncakeEngine, "call_bytes", 256)
    made = build_engine("mooncake", EngineSettings("127.0.0.1", False))
    made.library = library
    made.target = np.zeros(4096, dtype=np.uint8)
    made.open([(made.target.ctypes.data, 4096)])
    return made


def read(engine, *pieces):
    offsets = np.array([o for o, _ in pieces], dtype=np.int64)
    sizes = np.array([n for _, n in pieces], dtype=np.int64)
    runs = Runs(offsets + SOURCE.ctypes.data, offsets + engine.target.ctypes.data, sizes)
    return engine.read(msgspec.msgpack.encode(Address("peer", "tcp", 0, b"")), runs, 5.0)


def test_runs_of_all_sizes_arrive_and_buffers_are_used_again(engine):
    pieces = [(0, 10), (100, 256), (400, 257), (1000, 1000), (2100, 1), (2200, 255)] + [(3000 + 2 * i, 1) for i in range(500)]
    result = read(engine, *pieces)
    assert (result.status, result.nbytes) == (Status.OK, sum(n for _, n in pieces))
    expected = np.zeros_like(SOURCE)
    for offset, size in pieces:
        expected[offset : offset + size] = SOURCE[offset : offset + size]
    assert (engine.target == expected).all()
    assert [n for _, n in engine.library.registered].count(256) == 1


def test_nothing_is_written_to_targets_after_an_error(engine):
    engine.library.codes = [-1]
    assert read(engine, (0, 200)).status is Status.FATAL
    engine.library.write_late()
    assert not engine.target.any()
    assert read(engine, (0, 200)).status is Status.OK
    failed, later = (call[0][0] for call in engine.library.calls)
    assert failed != later, "the library may still write there"


def test_failed_buffers_are_bounded(engine):
    engine.library.codes = [-1] * 20
    for _ in range(16):
        assert "answered -1" in read(engine, (0, 8)).text
    assert "16 calls have failed" in read(engine, (0, 8)).text
    assert len(engine.library.calls) == 16


def test_reach_reads_into_registered_memory(engine):
    own = msgspec.msgpack.decode(engine.address(), type=Address)
    assert engine.reach(engine.address()) == ""
    wrong = msgspec.msgpack.encode(Address(own.session, "tcp", own.at, bytes(64)))
    assert "is not prefill's worker" in engine.reach(wrong)


def test_device_memory_is_refused():
    with pytest.raises(ValueError, match="buffers in host memory"):
        build_engine("mooncake", EngineSettings("127.0.0.1", False, device="npu"))
