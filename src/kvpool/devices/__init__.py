"""Devices and copy engines by kind ("cpu", "cuda", "npu"). ValueError in one line where there is none yet."""

from __future__ import annotations

from kvpool.devices.base import CopyEngine, Device, Event
from kvpool.devices.cpu import CpuCopyEngine, CpuDevice
from kvpool.options.availability import ENGINE_DEVICES

__all__ = ["CopyEngine", "Device", "Event", "copy_engine", "device_of"]


def copy_engine(device: str) -> CopyEngine:
    """Who moves bytes between this device's memory and a mapped store."""
    if device == "cpu":
        return CpuCopyEngine()
    raise ValueError(f"device {device!r}: no copy engine yet, so the local store cannot reach its memory (accepted: cpu)")


def device_of(kind: str) -> Device:
    """The device of a worker's KV memory."""
    if kind not in ENGINE_DEVICES:
        raise ValueError(f"device {kind!r}: not available yet (accepted: {', '.join(ENGINE_DEVICES)})")
    return CpuDevice()
