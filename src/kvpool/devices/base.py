"""Devices: how a worker's threads meet one, and who moves bytes between its memory and a mapped store."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class CopyEngine(Protocol):
    """Moves byte runs. ``name`` is the device kind: cpu, cuda or npu."""

    name: str

    def copy(self, targets: Int64, sources: Int64, sizes: Int64, *, into_pool: bool) -> None:
        """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]`` for every i (1-D, same length), and return when
        all bytes have arrived. ``into_pool``: the targets are the store's memory, else the sources are. The runs must not overlap.
        The caller vouches for the addresses."""
        ...


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Return when everything submitted before the event was recorded has been done."""
        ...


class Device(Protocol):
    """The device that holds a worker's KV memory."""

    kind: str

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread: the first call of every thread that touches KV memory."""
        ...

    def record(self) -> Event:
        """An event after all that the calling thread has submitted so far: KV written by the step is whole once it has passed."""
        ...
