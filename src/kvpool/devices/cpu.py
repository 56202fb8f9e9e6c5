"""Host memory: written when the forward returns, moved by the processor."""

from __future__ import annotations

import ctypes
from functools import partial

from kvpool.devices import own_memory
from kvpool.devices.base import Event, Int64
from kvpool.devices.copy_threads import share_runs
from kvpool.devices.process_memory import joined


class CpuCopyEngine:
    """Host memory to host memory; runs that continue each other on both sides are moved as one, large copies by several threads
    (``alone``: by the caller's only)."""

    name = "cpu"

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone

    def copy(self, targets: Int64, sources: Int64, sizes: Int64, *, into_pool: bool) -> None:
        targets, sources, sizes = joined(targets, sources, sizes)
        if self._alone:
            _move(into_pool, targets, sources, sizes)
        else:
            share_runs(partial(_move, into_pool), targets, sources, sizes)


def _move(into_pool: bool, targets: Int64, sources: Int64, sizes: Int64) -> None:
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
