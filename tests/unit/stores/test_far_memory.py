"""Copies between processes, here from and to this one: every byte arrives, whatever threads share them."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.stores.yuanrong import far_memory

PAGE = mmap.PAGESIZE


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 5), st.integers(1, 3000))
def test_every_byte_is_copied_once(lengths: list[int], threads: int, share: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    source = np.random.default_rng(1).integers(1, 256, int(sizes.sum()) + 1, dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64) if lengths else sizes
    there, back = np.zeros(2 * source.size + 60, dtype=np.uint8), np.zeros_like(source)
    far, near = there.ctypes.data + starts + np.arange(len(sizes)), source.ctypes.data + starts  # gaps: nothing can be joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_memory, "THREADS", threads)
        patch.setattr(far_memory, "SHARE", share)
        patch.setattr(os, "sched_getaffinity", lambda _pid: set(range(threads)))
        shares = far_memory._shares(sizes)
        assert [row for part in shares for row in range(len(sizes))[part]] == list(range(len(sizes)))
        assert len(shares) <= threads
        far_memory.write(os.getpid(), far, near, sizes)
        far_memory.read(os.getpid(), far, back.ctypes.data + starts, sizes)
    assert np.array_equal(back[:-1], source[:-1])
    assert int(np.count_nonzero(there)) == int(sizes.sum())


def test_shares_are_of_similar_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    sizes = np.full(1024, 64 << 10, dtype=np.int64)
    parts = [int(sizes[part].sum()) for part in far_memory._shares(sizes)]
    assert parts == [16 << 20] * far_memory.THREADS
    assert len(far_memory._shares(sizes[:200])) == 1


@pytest.mark.parametrize("bad", [0, 3])
def test_memory_that_ends_early_is_an_error_of_the_whole_copy(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_memory, "SHARE", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    near, there = np.ones(4 * PAGE, dtype=np.uint8), np.zeros(8 * PAGE, dtype=np.uint8)
    far = there.ctypes.data + 2 * PAGE * np.arange(4, dtype=np.int64)
    far[bad] = 0
    with pytest.raises(OSError, match="copying 4096 bytes"):
        far_memory.write(os.getpid(), far, near.ctypes.data + PAGE * np.arange(4), np.full(4, PAGE, dtype=np.int64))
    arrived = [int(there[2 * PAGE * row]) for row in range(4)]
    assert sum(arrived) == 3  # the others have ended, too
