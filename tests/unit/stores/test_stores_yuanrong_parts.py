"""The parts of the openYuanrong store that need no library: names, errors, messages, copies between processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import eventually

from kvpool.core.keys import key_prefix
from kvpool.stores.base import Status
from kvpool.stores.yuanrong import child, far_memory, library
from kvpool.stores.yuanrong.child import flat, offsets_of
from kvpool.stores.yuanrong.codes import brief, code_of, result_of
from kvpool.stores.yuanrong.keys import MAX_NAME, PROBE, name_of
from kvpool.stores.yuanrong.messages import Buffer, Channel, Reply, Request

TAKEN = re.compile(r"[a-zA-Z0-9\-_!@#%\^\*\(\)\+\=\:;]{1,255}")


@given(st.binary(min_size=1, max_size=400), st.binary(min_size=1, max_size=400))
def test_bc_013_names_are_taken_and_distinct(one, other):
    names = name_of(one), name_of(other)
    assert all(TAKEN.fullmatch(name) for name in names)
    assert (names[0] == names[1]) == (one == other)


@given(st.binary(min_size=1, max_size=64))
def test_bc_013_keys_of_kvpool_are_their_own_names(block_hash):
    key = key_prefix("0123456789abcdef", 3, "h0-7_l0-31s2_c0_0") + block_hash.hex().encode()
    assert len(key) > MAX_NAME or name_of(key) == key.decode()
    assert TAKEN.fullmatch(PROBE)
    assert len(PROBE) == MAX_NAME


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("code: [Key not found], msg: [Cannot get objects]", Status.MISSING, "Key not found"),
        ("code: [Out of memory], msg: [no\n  room]", Status.NO_SPACE, "Out of memory"),
        ("code: [RPC unavailable], msg: [x]", Status.TRANSIENT, "RPC unavailable"),
        ("code:[RPC deadline exceeded]", Status.TRANSIENT, "RPC deadline exceeded"),
        ("code: [Not authorized]", Status.FATAL, "Not authorized"),
        ("code: [RPC unavailable], msg: [x]. RPC Retry detail: [ Out of memory * 3 ]", Status.NO_SPACE, "RPC unavailable"),
        ("something new", Status.TRANSIENT, ""),
    ],
)
def test_errors_become_results_with_their_text(text, status, code):
    result = result_of(text)
    assert (result.status, code_of(text)) == (status, code)
    assert result.text == " ".join(text.split())


def test_long_texts_are_cut():
    assert len(brief("x" * 5000)) == 300


@given(st.lists(st.text(max_size=50), max_size=50), st.integers(0, 2**40), st.lists(st.integers(1, 2**60), max_size=9))
def test_messages_arrive_whole_and_in_order(names, nbytes, numbers):
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    sent = [Request(1, "create", 1.5, names=names, nbytes=nbytes), Request(2, "drop", 0.0, buffers=numbers)]
    for message in sent:
        one.send(message)
    assert [other.receive(Request), other.receive(Request)] == sent
    reply = Reply(1, buffers=[None, Buffer(1, 2**47, 3)], found=[True], text="é")
    other.send(reply)
    assert one.receive(Reply) == reply
    one.close()
    assert other.receive(Request) is None
    other.close()


def test_a_large_message_arrives_whole():
    ours, theirs = socket.socketpair()
    one, other, names = Channel(ours), Channel(theirs), ["n" * 200] * 10_000
    thread = threading.Thread(target=one.send, args=(Request(1, "exists", 0.0, names=names),))
    thread.start()
    request = other.receive(Request)
    thread.join(60)
    assert request is not None
    assert request.names == names
    one.close()
    other.close()


HOLDER = """
import sys, numpy as np
memory = np.arange(int(sys.argv[1]), dtype=np.uint8)
print(memory.ctypes.data, flush=True)
sys.stdin.readline()
print(int(memory.astype(np.uint64).sum()), flush=True)
"""


@pytest.fixture
def holder():
    """Another process with 1 MiB of memory: its pid, and the address."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(1 << 20)], stdin=-1, stdout=-1, text=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_runs_are_copied_both_ways(holder):
    process, address = holder
    count, size = 4096, 256  # more runs than one system call takes
    near = np.zeros((count, 2 * size), dtype=np.uint8)
    rows = near.ctypes.data + np.arange(count, dtype=np.int64) * near.strides[0]
    far = address + np.arange(count, dtype=np.int64) * size
    sizes = np.full(count, size, dtype=np.int64)
    far_memory.read(process.pid, far, rows, sizes)
    assert np.array_equal(near[:, :size].ravel(), np.arange(count * size, dtype=np.uint8))
    assert not near[:, size:].any()
    near[:] = 1
    far_memory.write(process.pid, far, rows, sizes)
    process.stdin.write("\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) == count * size


def test_a_copy_that_cannot_be_whole_is_an_error(holder):
    process, address = holder
    near = np.zeros(16, dtype=np.uint8)
    one = np.array([16], dtype=np.int64)
    with pytest.raises(OSError, match="copying 16 bytes"):
        far_memory.read(process.pid, np.array([16], dtype=np.int64), np.array([near.ctypes.data]), one)
    process.kill()
    process.wait()
    with pytest.raises(OSError, match="No such process"):
        far_memory.read(process.pid, np.array([address]), np.array([near.ctypes.data]), one)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=30))
def test_joined_runs_move_the_same_bytes(steps):
    source = np.random.default_rng(len(steps)).integers(0, 256, 4096, dtype=np.uint8)
    target, wanted = np.zeros(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    far, near, sizes, at = [], [], [], 0
    for size, gap in steps:
        far.append(source.ctypes.data + at)
        near.append(target.ctypes.data + at)
        sizes.append(size)
        wanted[at : at + size] = source[at : at + size]
        at += size + gap
    far_memory.read(os.getpid(), *(np.array(values, dtype=np.int64) for values in (far, near, sizes)))
    assert np.array_equal(target, wanted)


def test_offsets():
    assert offsets_of(np.array([3, 4, 5]), 10).tolist() == [10, 13, 17]
    assert flat(np.array([100, 200]), np.array([0, 3])).tolist() == [100, 103, 200, 203]


def test_the_log_folder_is_made_and_named(tmp_path):
    env = {"DATASYSTEM_CLIENT_LOG_DIR": str(tmp_path / "a" / "b")}
    assert library.make_log_folder(env) == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    env = {"HOME": str(tmp_path)}
    assert library.make_log_folder(env) == env["DATASYSTEM_CLIENT_LOG_DIR"] == str(tmp_path / ".datasystem" / "logs")


def test_a_log_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"DATASYSTEM_CLIENT_LOG_DIR='.*file/logs': the folder cannot be used"):
        library.make_log_folder({"DATASYSTEM_CLIENT_LOG_DIR": str(tmp_path / "file" / "logs")})
    replaced = library.make_log_folder({"HOME": str(tmp_path / "file")})
    assert os.path.isdir(replaced)
    os.rmdir(replaced)


def test_the_client_process_does_not_inherit_the_binding_of_a_worker(tmp_path, monkeypatch):
    """With these variables a library that uses OpenMP would bind it to the CPU on which the worker computes."""
    monkeypatch.setenv("DATASYSTEM_CLIENT_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("KVPOOL_SEEN", "yes")
    for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.setenv(name, "0")
    ours, theirs = socket.socketpair()
    with theirs, ours:
        process = child._start(theirs.fileno())
        try:
            environ = Path(f"/proc/{process.pid}/environ")
            pairs = eventually(environ.read_bytes, "its environment, which is empty for a moment at first").split(b"\0")
            names = {pair.partition(b"=")[0].decode() for pair in pairs}
        finally:
            process.kill()
            process.wait()
    assert "KVPOOL_SEEN" in names
    assert not names & {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}


def test_the_name_of_the_connect_timeout_differs_by_version():
    class Old:
        def __init__(self, host, port, timeout_ms=60000, req_timeout_ms=0): ...

    class New:
        def __init__(self, host, port, connect_timeout_ms=9000, req_timeout_ms=0, enable_exclusive_connection=False): ...

    assert library.connect_arguments(Old, 1, 2, True) == {"timeout_ms": 1, "req_timeout_ms": 2}
    assert library.connect_arguments(New, 1, 2, True) == {
        "connect_timeout_ms": 1,
        "req_timeout_ms": 2,
        "enable_exclusive_connection": True,
    }
