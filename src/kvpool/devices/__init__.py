"""Copy engines by device kind."""

from __future__ import annotations

from kvpool.devices.base import CopyEngine
from kvpool.devices.cpu import CpuCopyEngine

__all__ = ["CopyEngine", "copy_engine"]


def copy_engine(device: str) -> CopyEngine:
    """The engine of a device kind ("cpu", "cuda", "npu"). ValueError in one line where there is none yet."""
    if device == "cpu":
        return CpuCopyEngine()
    raise ValueError(f"device {device!r}: no copy engine yet, so the local store cannot reach its memory (accepted: cpu)")
