"""The trailer of objects: what it catches, and what it leaves as it is."""

import numpy as np

from kvpool.stores import checksums
from kvpool.stores.base import Batch


def batch(memory, segment):
    starts = np.arange(0, memory.shape[1], segment, dtype=np.int64)
    sizes = np.minimum(segment, memory.shape[1] - starts)
    rows = memory.ctypes.data + np.arange(len(memory), dtype=np.int64) * memory.strides[0]
    return Batch([str(i).encode() for i in range(len(memory))], rows[:, None] + starts, sizes)


def test_every_bit_counts_and_segments_do_not():
    memory = np.random.default_rng(1).integers(0, 256, (3, 5000), dtype=np.uint8)
    wider, trailers = checksums.sealed(batch(memory, 700))
    assert wider.object_nbytes == 5000 + checksums.TRAILER
    other = batch(memory, 5000)
    assert checksums.damaged(other, trailers, [0, 1, 2]) == []
    for place in (0, 2500, 4999):
        memory[1, place] ^= 0x10
        assert checksums.damaged(other, trailers, [0, 1, 2]) == [1]
        memory[1, place] ^= 0x10
    assert checksums.damaged(other, trailers, [1]) == []


def test_a_damaged_trailer_is_damage_and_a_plain_one_is_none():
    memory = np.zeros((1, 100), dtype=np.uint8)
    _, trailers = checksums.sealed(batch(memory, 100))
    for place in range(checksums.TRAILER):
        trailers[0, place] ^= 1
        assert checksums.damaged(batch(memory, 100), trailers, [0]) == [0]
        trailers[0, place] ^= 1
    trailers[0] = np.frombuffer(checksums.PLAIN, dtype=np.uint8)
    assert checksums.damaged(batch(memory, 100), trailers, [0]) == []


def test_running_is_the_same_sum():
    memory = np.random.default_rng(2).integers(0, 256, 3000, dtype=np.uint8)
    running = checksums.Running()
    for start in range(0, 3000, 1000):
        running.add([memory.ctypes.data + start, memory.ctypes.data + start + 400], [400, 600])
    assert running.position == 3000
    assert running.trailer() == checksums.trailer_of([memory.ctypes.data], [3000])
