"""What a run was asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """`quick`: smallest form. `traces`: folder of the public traces, or None. `disk`: a folder on the disk to measure."""

    quick: bool
    traces: Path | None
    disk: Path


def cache_folder() -> Path:
    """The per-user folder for what benchmarks make once and keep: environments of peers, models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool" / "bench"
