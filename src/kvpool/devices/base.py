"""Copy engines: who moves bytes between KV memory and a mapped store."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class CopyEngine(Protocol):
    """Moves byte runs. ``name`` is the device kind: cpu, cuda or npu."""

    name: str

    def copy(self, targets: Int64, sources: Int64, sizes: Int64) -> None:
        """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]`` for every i (1-D, same length), and return when
        all bytes have arrived. The runs must not overlap. The caller vouches for the addresses."""
        ...
