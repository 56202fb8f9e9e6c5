"""The disk tier of the local store: how its options depend on one another and on the host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.options.errors import OptionError
from kvpool.options.mooncake_ssd import check_directory

if TYPE_CHECKING:
    from kvpool.options.ascend_store import AscendStoreOptions

GIB = 1 << 30
SWITCH = "enable_ssd_offload"
PATH = "ssd_offload_path"
FIELDS = (
    PATH,
    "local_ssd_size",
    "local_ssd_high_watermark",
    "local_ssd_low_watermark",
    "local_ssd_admission",
    "local_dram_high_watermark",
    "local_dram_low_watermark",
)


def without_unused_path(raw: Mapping[str, object]) -> dict[str, object]:
    """The path is judged only when the tier is on: anything may stand there before."""
    off = raw.get(SWITCH) in (None, False, 0) or str(raw[SWITCH]).strip().lower() in ("false", "0")
    return {key: value for key, value in raw.items() if key != PATH or not off or isinstance(value, str)}


def check_local_ssd(options: AscendStoreOptions, given: Collection[str], where: str) -> list[str]:
    """Warnings; OptionError for what would fail when the pool opens, and for what contradicts itself."""
    if not options.enable_ssd_offload:
        unused = [field for field in FIELDS if field in given]
        return [f"{', '.join(unused)}: no effect without {SWITCH}"] if unused else []
    if options.backend != "local":
        reason = f"is an option of the local backend; the {options.backend} backend has its own configuration file"
        raise OptionError(SWITCH, True, reason, where=where)
    for tier in ("dram", "ssd"):
        low, high = getattr(options, f"local_{tier}_low_watermark"), getattr(options, f"local_{tier}_high_watermark")
        if low > high:
            raise OptionError(f"local_{tier}_low_watermark", low, f"is above local_{tier}_high_watermark={high}", where=where)
    folder = check_directory(options.ssd_offload_path, where)
    if options.local_ssd_size is None:
        free = shutil.disk_usage(folder).free / GIB
        reason = (
            f"is required with {SWITCH}: the room on the disk for all engines of the host together ({free:.0f} GB are free now)"
        )
        raise OptionError("local_ssd_size", None, reason, where=where)
    return _too_large(folder, options.local_pool_name, options.local_ssd_size)


def _too_large(folder: str, name: str, nbytes: int) -> list[str]:
    """A warning where the disk has less room than the tier is to have; what an earlier run allocated counts as room."""
    room = shutil.disk_usage(folder).free
    with suppress(OSError):
        room += os.stat(os.path.join(folder, name, "arena")).st_blocks * 512
    if nbytes <= room:
        return []
    return [f"local_ssd_size={nbytes / GIB:.1f} GB is more than the {room / GIB:.1f} GB free in {folder}: the tier will be smaller"]
