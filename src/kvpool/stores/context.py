"""Who opens a store, and from where: what adapters need to know beside their own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["worker", "scheduler", "owner", "tool"]
Device = Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class StoreContext:
    """``worker`` moves KV and may give memory to the pool, ``scheduler`` only looks up, ``owner`` only gives memory, ``tool`` is a
    command that looks in. ``device`` is where the KV lies; ``device_id`` its number on this host."""

    role: Role = "worker"
    device: Device = "cpu"
    device_id: int = 0
    rank: int = 0
    world_size: int = 1
    load_deadline_s: float | None = None  # how long an engine lets a load take; None where nobody loads


def device_kind(name: str) -> Device:
    """What vLLM calls a device type, in our words: everything that is not cpu or cuda is an NPU or refused elsewhere."""
    return "cpu" if name == "cpu" else "cuda" if name == "cuda" else "npu"
