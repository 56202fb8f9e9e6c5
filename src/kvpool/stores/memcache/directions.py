"""Which way bytes go, in the library's numbers: they tell where the caller's memory lies."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.options.reach import check_reach
from kvpool.stores.context import Device

MEDIUM_DRAM = 1
"""The kind of pool memory that objects are allocated in."""


class Directions(NamedTuple):
    put: int
    get: int


HOST = Directions(put=3, get=2)
NPU = Directions(put=0, get=1)


def directions(device: Device) -> Directions:
    """For KV that lies on ``device``. ValueError for one whose memory the library cannot reach."""
    check_reach("memcache", device)
    return HOST if device == "cpu" else NPU
