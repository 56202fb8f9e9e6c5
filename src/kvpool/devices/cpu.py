"""The copy engine of host memory: memmove."""

from __future__ import annotations

import ctypes

from kvpool.devices.base import Int64


class CpuCopyEngine:
    """Host memory to host memory. ctypes releases the interpreter lock around each run."""

    name = "cpu"

    def copy(self, targets: Int64, sources: Int64, sizes: Int64) -> None:
        move = ctypes.memmove
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            move(target, source, nbytes)
