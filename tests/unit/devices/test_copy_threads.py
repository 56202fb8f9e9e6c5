"""Threads that share a copy: every piece once, errors after all have ended, no waiting for a thread that is busy elsewhere."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.devices import CpuCopyEngine, copy_threads
from kvpool.devices.copy_threads import share, share_runs
from kvpool.devices.process_memory import cut

WAIT = 10.0


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> copy_threads._Helpers:
    """Three of them, however few CPUs there are."""
    made = copy_threads._Helpers(3)
    monkeypatch.setattr(copy_threads, "_helpers", lambda: made)
    return made


def test_every_piece_is_done_once_by_several_threads() -> None:
    done: list[int] = []
    meeting = threading.Barrier(4, timeout=WAIT)

    def work(piece: int) -> None:
        if piece < 4:
            meeting.wait()  # four pieces are under way at one time, or this breaks
        done.append(piece)

    share(work, range(100))
    assert sorted(done) == list(range(100))


def test_a_copy_needs_no_helper(helpers: copy_threads._Helpers) -> None:
    """All of them are busy: the caller does the work, and does not wait for them."""
    go, busy = threading.Event(), threading.Semaphore(0)
    for _ in range(3):
        helpers.ask(lambda: (busy.release(), go.wait(WAIT)), 1)
    for _ in range(3):
        assert busy.acquire(timeout=WAIT)
    done: list[str] = []
    share(lambda _piece: done.append(threading.current_thread().name), range(10))
    assert done == [threading.current_thread().name] * 10
    go.set()


def test_an_error_ends_the_copy_when_no_piece_is_under_way_any_more() -> None:
    begun, ended = [], []
    meeting = threading.Barrier(4, timeout=WAIT)

    def work(piece: int) -> None:
        begun.append(piece)
        meeting.wait()
        if piece == 2:
            raise OSError(5, "broken")
        time.sleep(0.05)
        ended.append(piece)

    with pytest.raises(OSError, match="broken"):
        share(work, range(100))
    assert sorted(begun) == [0, 1, 2, 3]
    assert sorted(ended) == [0, 1, 3]


def test_helpers_survive_errors() -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            share(lambda piece: 1 // piece, [0] * 8)
    test_every_piece_is_done_once_by_several_threads()


def test_an_interrupt_waits_for_the_pieces_under_way() -> None:
    """The memory belongs to the copy until then."""
    here, others = threading.current_thread(), threading.Event()
    ended: list[int] = []

    def work(piece: int) -> None:
        if threading.current_thread() is here:
            assert others.wait(WAIT)
            raise KeyboardInterrupt
        others.set()
        time.sleep(0.1)
        ended.append(piece)

    with pytest.raises(KeyboardInterrupt):
        share(work, range(2))
    assert len(ended) == 1


def test_a_forked_child_has_threads_of_its_own() -> None:
    """It has none of its parent's, and must not wait for them."""
    script = (
        "import os, threading; from kvpool.devices import copy_threads as c; "
        "c.share(lambda piece: None, range(9)); child = os.fork(); "
        "c.share(lambda piece: None, range(9)); "
        "names = [t.name for t in threading.enumerate() if t.name.startswith('kvpool-copy')]; "
        "child == 0 and os._exit(len(names)); code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]); "
        "assert code == len(names) == c._helpers().count, (code, names)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@given(
    st.lists(st.integers(0, 5000), max_size=60),
    st.integers(1, 2000),
    st.integers(1, 4000),
    st.booleans(),
)
def test_any_runs_are_copied_in_pieces(lengths: list[int], least: int, most: int, into_pool: bool) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    source = np.random.default_rng(1).integers(1, 256, int(sizes.sum()) + 1, dtype=np.uint8)
    starts = np.cumsum(sizes) - sizes
    target = np.zeros(source.size + 60, dtype=np.uint8)
    to = target.ctypes.data + starts + np.arange(len(sizes))  # gaps: nothing can be joined
    wanted = np.zeros_like(target)
    for row, (start, nbytes) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        wanted[start + row : start + row + nbytes] = source[start : start + nbytes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_threads, "LEAST_BYTES", least)
        patch.setattr(copy_threads, "MOST_BYTES", most)
        CpuCopyEngine().copy(to, source.ctypes.data + starts, sizes, into_pool=into_pool)
    assert np.array_equal(target, wanted)


def test_small_copies_are_not_shared() -> None:
    calls: list[int] = []
    runs = np.arange(2, dtype=np.int64)
    share_runs(lambda ones, _others, _sizes: calls.append(len(ones)), runs, runs, np.full(2, copy_threads.LEAST_BYTES - 1))
    assert calls == [2]


def test_pieces_are_of_similar_size() -> None:
    sizes = np.full(4096, 64 << 10, dtype=np.int64)
    seen: list[int] = []
    share_runs(lambda _ones, _others, sizes: seen.append(int(sizes.sum())), sizes, sizes, sizes)
    assert seen == [32 << 20] * 8


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 40))
def test_cut_runs_continue_each_other(lengths: list[int], nbytes: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    ones, others, pieces = cut(1000 * np.arange(len(sizes)), 7000 + 500 * np.arange(len(sizes)), sizes, nbytes)
    assert pieces.max(initial=0) <= nbytes
    told = [(one, other, n) for one, other, n in zip(ones.tolist(), others.tolist(), pieces.tolist(), strict=True)]
    covered = [[(one + i, other + i) for i in range(n)] for one, other, n in told]
    assert [pair for run in covered for pair in run] == [
        (1000 * row + i, 7000 + 500 * row + i) for row, length in enumerate(lengths) for i in range(length)
    ]
