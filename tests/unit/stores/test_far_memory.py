"""Copies between processes, here from and to this one: every byte arrives, whatever threads share them."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.devices import copy_threads
from kvpool.stores.yuanrong import far_memory

PAGE = mmap.PAGESIZE


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 3000))
def test_every_byte_is_copied_once(lengths: list[int], least: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    source = np.random.default_rng(1).integers(1, 256, int(sizes.sum()) + 1, dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64) if lengths else sizes
    there, back = np.zeros(2 * source.size + 60, dtype=np.uint8), np.zeros_like(source)
    far, near = there.ctypes.data + starts + np.arange(len(sizes)), source.ctypes.data + starts  # gaps: nothing can be joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_threads, "LEAST_BYTES", least)
        far_memory.write(os.getpid(), far, near, sizes)
        far_memory.read(os.getpid(), far, back.ctypes.data + starts, sizes)
    assert np.array_equal(back[:-1], source[:-1])
    assert int(np.count_nonzero(there)) == int(sizes.sum())


def test_memory_that_is_not_there_is_an_error_of_the_whole_copy() -> None:
    near, there = np.ones(4 * PAGE, dtype=np.uint8), np.zeros(8 * PAGE, dtype=np.uint8)
    far = there.ctypes.data + 2 * PAGE * np.arange(4, dtype=np.int64)
    far[3] = 0
    with pytest.raises(OSError, match="copying 16384 bytes"):
        far_memory.write(os.getpid(), far, near.ctypes.data + PAGE * np.arange(4), np.full(4, PAGE, dtype=np.int64))
