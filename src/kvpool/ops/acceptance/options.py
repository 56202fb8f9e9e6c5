"""What an acceptance run is told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from kvpool.ops.acceptance.report import PARTS
from kvpool.ops.launch import options as launch
from kvpool.options.ascend_store import BACKENDS, BackendName
from kvpool.options.errors import OptionError
from kvpool.options.probe import Device
from kvpool.options.reach import check_reach

DEVICES: tuple[Device, ...] = get_args(Device)
BUDGET_S = 900.0


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """``model``: a folder; None is the demo's model. ``dram`` and ``kv_cache`` in bytes: the pool, and each engine's own cache
    (None: vLLM decides). ``logs``: a folder that keeps the logs. ``engine_args`` go to every engine."""

    device: Device
    backend: BackendName
    model: str | None = None
    parts: Collection[str] = PARTS
    budget_s: float = BUDGET_S
    dram: int = 1 << 30
    kv_cache: int | None = None
    tp: int = 1
    logs: Path | None = None
    engine_args: tuple[str, ...] = ()


def check(options: AcceptanceOptions) -> None:
    """OptionError, in one line, for what cannot run."""
    if options.device not in DEVICES:
        raise OptionError("--device", options.device, f"accepted: {', '.join(DEVICES)}")
    if options.backend not in BACKENDS:
        raise OptionError("--backend", options.backend, f"accepted: {', '.join(BACKENDS)}")
    check_reach(options.backend, options.device, "--backend")
    for part in options.parts:
        if part not in PARTS:
            raise OptionError("--only", part, f"accepted: {', '.join(PARTS)}")
    if options.model is not None and not (Path(options.model) / "config.json").is_file():
        raise OptionError("--model", options.model, "expected a folder with config.json")
    launch.check_common("mixed", options.engine_args)
