"""Host memory: written when the forward returns, moved by the processor."""

from __future__ import annotations

import ctypes

import numpy as np

from kvpool.devices import own_memory
from kvpool.devices.base import Event, Int64


class CpuCopyEngine:
    """Host memory to host memory; runs that continue each other on both sides are moved as one."""

    name = "cpu"

    def copy(self, targets: Int64, sources: Int64, sizes: Int64, *, into_pool: bool) -> None:
        if len(sizes) > 1:
            follows = (targets[1:] == targets[:-1] + sizes[:-1]) & (sources[1:] == sources[:-1] + sizes[:-1])
            if follows.any():
                first = np.flatnonzero(np.concatenate(([True], ~follows)))
                targets, sources, sizes = targets[first], sources[first], np.add.reduceat(sizes, first)
        if len(sizes) > 1 and own_memory.copy(targets, sources, sizes, into_pool=into_pool):
            return
        move = ctypes.memmove
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            move(target, source, nbytes)


class PassedEvent:
    """Nothing is ever under way on a CPU when it is recorded."""

    def wait(self) -> None:
        return


class CpuDevice:
    """Host threads have no current device."""

    kind = "cpu"

    def bind_thread(self) -> None:
        return

    def record(self) -> Event:
        return PassedEvent()
