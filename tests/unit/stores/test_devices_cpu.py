"""The copy engine of host memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.devices import copy_engine


@given(runs=st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=40), seed=st.integers(0, 99))
def test_copies_every_run_and_nothing_else(runs, seed):
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
    copy_engine("cpu").copy(to, source.ctypes.data + np.array(sources, dtype=np.int64), sizes)
    assert np.array_equal(target, model)
