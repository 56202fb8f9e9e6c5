"""A checksum at the end of every object, for stores whose libraries verify nothing between the caller's memory and theirs.

An object is then its pages and a trailer of 16 bytes: a mark and the xxh3 of the pages. ``PLAIN`` marks an object without a sum:
one that was written in pieces out of order. The bytes must be readable by the CPU; objects in device memory have no trailer.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.stores.base import Batch

TRAILER = 16
SUMMED = b"kvpoolS1"
PLAIN = b"kvpoolP1" + bytes(8)
_SUM = struct.Struct("<8sQ")

Trailers = NDArray[np.uint8]  # [number of objects, TRAILER]


@functools.lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * nbytes


class Running:
    """The sum of an object whose bytes come in order."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.position = 0

    def add(self, addresses: Iterable[int], sizes: Iterable[int]) -> None:
        for address, nbytes in zip(addresses, sizes, strict=True):
            if nbytes:
                self._state.update(_array(nbytes).from_address(address))
                self.position += nbytes

    def trailer(self) -> bytes:
        return _SUM.pack(SUMMED, self._state.intdigest())


def trailer_of(addresses: Iterable[int], sizes: Iterable[int]) -> bytes:
    running = Running()
    running.add(addresses, sizes)
    return running.trailer()


def with_room(batch: Batch) -> tuple[Batch, Trailers]:
    """The batch with one more segment per object, for its trailer; that memory must be kept as long as the batch is used."""
    trailers = np.zeros((len(batch.keys), TRAILER), dtype=np.uint8)
    places = trailers.ctypes.data + TRAILER * np.arange(len(batch.keys), dtype=np.int64)
    sizes = np.append(batch.sizes, np.int64(TRAILER))
    return Batch(batch.keys, np.hstack([batch.addresses, places[:, None]]), sizes), trailers


def sealed(batch: Batch) -> tuple[Batch, Trailers]:
    """Like ``with_room``, with the sums of what the segments hold now."""
    wider, trailers = with_room(batch)
    sizes = batch.sizes.tolist()
    for row, addresses in enumerate(batch.addresses.tolist()):
        trailers[row] = np.frombuffer(trailer_of(addresses, sizes), dtype=np.uint8)
    return wider, trailers


def damaged(batch: Batch, trailers: Trailers, rows: Sequence[int]) -> list[int]:
    """Those of ``rows`` whose segments do not hold what their trailer says."""
    sizes = batch.sizes.tolist()
    addresses = batch.addresses.tolist()
    bad = []
    for row in rows:
        trailer = trailers[row].tobytes()
        if trailer != PLAIN and trailer != trailer_of(addresses[row], sizes):
            bad.append(row)
    return bad
