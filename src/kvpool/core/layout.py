"""Layouts: where each page of a block sits inside an object and in KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.core.keys import Shard

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages of one layer's tensor: block b's page is ``nbytes`` contiguous bytes at ``base + b * stride``."""

    layer: int
    name: str
    base: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class BlockLayout:
    """One span of layers of one KV-cache group on one rank: an object is its pages, layer-major, and nothing else."""

    group: int
    shard: Shard
    pages: tuple[PageRun, ...]
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if list(self.pages) != sorted(self.pages, key=lambda p: (p.layer, p.name)):
            raise ValueError("pages must be sorted by layer, then name")
        bases = np.array([p.base for p in self.pages], dtype=np.int64)
        strides = np.array([p.stride for p in self.pages], dtype=np.int64)
        object.__setattr__(self, "_bases", bases)
        object.__setattr__(self, "_strides", strides)

    @property
    def sizes(self) -> Int64:
        """Bytes of each segment of an object, in order."""
        return np.array([p.nbytes for p in self.pages], dtype=np.int64)

    @property
    def object_nbytes(self) -> int:
        return sum(p.nbytes for p in self.pages)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each page inside an object."""
        ends = np.cumsum([p.nbytes for p in self.pages]).tolist()
        return (0, *ends[:-1])

    def addresses(self, block_ids: Sequence[int] | Int64) -> Int64:
        """Where the pages of the given blocks lie in memory: int64 ``[len(block_ids), len(pages)]``."""
        ids = np.asarray(block_ids, dtype=np.int64)
        bases: Int64 = self._bases  # type: ignore[attr-defined]
        strides: Int64 = self._strides  # type: ignore[attr-defined]
        return bases[None, :] + ids[:, None] * strides[None, :]


def page_geometry(shape: Sequence[int], strides: Sequence[int], itemsize: int, num_blocks: int) -> tuple[int, int]:
    """``(stride, nbytes)`` in bytes of one block's page in a tensor whose first axis counts blocks (or equal parts of blocks).

    ``strides`` are in elements. ValueError where a block is not one dense run of memory: such a cache cannot be pooled as is.
    """
    if shape[0] % num_blocks:
        raise ValueError(f"cache of shape {tuple(shape)} does not hold {num_blocks} blocks evenly")
    parts = shape[0] // num_blocks
    expected = 1
    for length, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda axis: axis[1]):
        if length == 1:
            continue
        if stride != expected:
            raise ValueError(f"a block of shape {tuple(shape[1:])}, strides {tuple(strides[1:])} is not one dense run")
        expected *= length
    if parts > 1 and strides[0] != expected:
        raise ValueError(f"a block is {parts} parts that do not adjoin (stride {strides[0]}, {expected} elements each)")
    return strides[0] * parts * itemsize, expected * parts * itemsize
