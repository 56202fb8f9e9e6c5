"""The CPU copy engine: any runs, in both directions, with and without the system calls it prefers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.devices import CpuCopyEngine, copy_engine, own_memory


@pytest.fixture(params=["system calls", "memmove"])
def engine(request, monkeypatch):
    if request.param == "memmove":
        monkeypatch.setattr(own_memory, "allowed", lambda: False)
    else:
        assert own_memory.allowed(), "this system forbids process_vm_readv on oneself: run the tests elsewhere"
    return CpuCopyEngine()


def move(engine, sizes, gaps, into_pool):
    """Copy runs that lie apart by ``gaps`` into a packed target, and say whether exactly that has happened."""
    starts = np.cumsum([0, *(np.array(sizes) + gaps)])[:-1].astype(np.int64)
    source = np.random.default_rng(len(sizes)).integers(0, 256, int(starts[-1]) + sizes[-1], dtype=np.uint8)
    places = np.cumsum([0, *sizes]).astype(np.int64)
    target = np.full(int(places[-1]) + 1, 7, dtype=np.uint8)
    size = np.array(sizes, dtype=np.int64)
    engine.copy(target.ctypes.data + places[:-1], source.ctypes.data + starts, size, into_pool=into_pool)
    wanted = np.concatenate([source[a : a + n] for a, n in zip(starts, sizes, strict=True)])
    return np.array_equal(target[:-1], wanted) and target[-1] == 7


@pytest.mark.parametrize("into_pool", [True, False])
@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 3000])
def test_many_runs(engine, count, into_pool):
    assert move(engine, [100] * count, 12, into_pool)


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60), gap=st.integers(0, 3), into_pool=st.booleans())
def test_any_runs(sizes, gap, into_pool):
    assert move(CpuCopyEngine(), sizes, gap, into_pool)


@given(runs=st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=40), seed=st.integers(0, 99), into_pool=st.booleans())
def test_copies_every_run_and_nothing_else(runs, seed, into_pool):
    """Some runs continue the one before on both sides, some only look so."""
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 256, 40 * 512, dtype=np.uint8)
    target, model = np.zeros_like(source), np.zeros_like(source)
    targets, sources, place, other = [], [], 0, 0
    for nbytes, joined in runs:
        if not joined:
            place, other = place + 1, other + int(rng.integers(0, 3))
        model[place : place + nbytes] = source[other : other + nbytes]
        targets.append(place)
        sources.append(other)
        place, other = place + nbytes, other + nbytes
    sizes = np.array([nbytes for nbytes, _ in runs], dtype=np.int64)
    to = target.ctypes.data + np.array(targets, dtype=np.int64)
    copy_engine("cpu").copy(to, source.ctypes.data + np.array(sources, dtype=np.int64), sizes, into_pool=into_pool)
    assert np.array_equal(target, model)


def test_calls_are_cut_by_bytes(monkeypatch):
    monkeypatch.setattr(own_memory, "MAX_BYTES", 1000)
    assert move(CpuCopyEngine(), [400, 700, 2000, 1, 999, 1000, 1], 1, True)


def test_a_call_that_stops_in_between_is_done_again_otherwise(monkeypatch):
    real = own_memory.readv
    own_memory.allowed()  # with the real one
    monkeypatch.setattr(own_memory, "readv", lambda pid, to, at, sizes: real(pid, to[:5], at[:5], sizes[:5]))
    assert move(CpuCopyEngine(), [100] * 10, 5, True)


def test_memory_that_is_not_there_is_refused_not_touched():
    """The system call answers EFAULT where memmove would end the process."""
    page = np.zeros(8, dtype=np.uint8)
    size, nowhere = np.array([8, 8], dtype=np.int64), np.array([8, 4096], dtype=np.int64)
    assert not own_memory.copy(np.full(2, page.ctypes.data, dtype=np.int64), nowhere, size, into_pool=True)
