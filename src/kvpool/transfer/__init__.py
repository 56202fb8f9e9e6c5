"""Prefill to decode: engines that move KV between processes, and the channel on which both sides agree what, when and whether."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpool.transfer.base import TransferEngine


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``host`` is where peers reach us; ``producer``: we are prefill. ``root`` None is the default folder of pools. ``hold_s``: how
    long what is published stays at most."""

    host: str
    producer: bool
    device: str = "cpu"
    protocol: str = "tcp"
    root: Path | None = None
    buffer_bytes: int = 2 << 30
    hold_s: float = 480.0


def build_engine(name: str, settings: EngineSettings) -> TransferEngine:
    """A transfer engine, not yet opened. ValueError in one line for an unknown one, or one that this device's memory is out of
    reach for."""
    if name == "local_host":
        from kvpool.transfer.engines.local_host import LocalHostEngine

        return LocalHostEngine(settings)
    if name == "process_vm":
        from kvpool.transfer.engines.process_vm import ProcessVmEngine

        return ProcessVmEngine(settings)
    if name == "mooncake":
        from kvpool.transfer.engines.mooncake_te import MooncakeEngine

        return MooncakeEngine(settings)
    raise ValueError(f"transfer engine {name!r} is unknown (accepted: local_host, process_vm, mooncake)")


__all__ = ["EngineSettings", "TransferEngine", "build_engine"]
