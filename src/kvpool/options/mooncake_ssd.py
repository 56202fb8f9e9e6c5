"""The disk tier of Mooncake: its directory and the environment variables that only Mooncake reads, checked before it starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import PurePosixPath

from kvpool.options.deployment import Deployment
from kvpool.options.environment import resource_config
from kvpool.options.errors import OptionError

GIB = 1 << 30
BUFFER = "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES"
LIMIT = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"
POLICY = "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY"
DEFAULTS = {BUFFER: 1342177280, "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": 0, LIMIT: 2199023255552}


def check_ssd(
    directory: str | None, path: str, env: Mapping[str, str], deployment: Deployment, *, fabric_segment: int | None = None
) -> list[str]:
    """Warnings; OptionError for what would fail or be ignored later. ``fabric_segment``: the segment size under fabric memory."""
    checked = check_directory(directory, path)
    sizes = {variable: _read_bytes(variable, env) for variable in DEFAULTS}
    policy = env.get(POLICY, "none")
    if policy not in ("none", "fifo", "lru"):
        raise OptionError(POLICY, policy, "expected none, fifo or lru")
    warnings = capacity_warnings(sizes[LIMIT], deployment.ranks, shutil.disk_usage(checked).total)
    if fabric_segment is not None:
        if sizes[BUFFER] % GIB:
            raise OptionError(BUFFER, sizes[BUFFER], "is not a multiple of 1GB, which fabric memory needs")
        quota = resource_config(env).get("fabric_memory.max_capacity")
        if isinstance(quota, int) and quota * GIB < fabric_segment + sizes[BUFFER]:
            warnings.append(f"fabric_memory.max_capacity={quota} GB is less than global_segment_size and {BUFFER} together")
    return warnings


def check_directory(directory: str | None, path: str) -> str:
    """The directory without a trailing slash; OptionError with its own reason for each way in which it is unfit."""

    def refuse(reason: str) -> OptionError:
        return OptionError("ssd_offload_path", directory, reason, where=path)

    if not directory:
        raise refuse("is required with enable_ssd_offload")
    if not directory.startswith("/"):
        raise refuse("is not absolute")
    if ".." in PurePosixPath(directory).parts:
        raise refuse("must not contain ..")
    plain = str(PurePosixPath(directory))
    if not os.path.lexists(plain):
        raise refuse("does not exist")
    if os.path.realpath(plain) != plain:
        raise refuse("is or passes through a symbolic link")
    if not os.path.isdir(plain):
        raise refuse("is not a directory")
    if not os.access(plain, os.W_OK | os.X_OK):
        raise refuse("is not writable")
    return plain


def capacity_warnings(limit: int, ranks: int, disk_nbytes: int) -> list[str]:
    """A warning where the limits of all ranks add up to more than the disk: the master would show room that is not there."""
    total = limit * ranks
    if total <= disk_nbytes:
        return []
    gb = f"{ranks} x {limit / GIB:.0f} GB is more than the {disk_nbytes / GIB:.0f} GB of the disk"
    return [f"{LIMIT}: {gb}; writes fail when it is full although monitoring shows room"]


def _read_bytes(variable: str, env: Mapping[str, str]) -> int:
    value = env.get(variable, str(DEFAULTS[variable]))
    if not (value.isascii() and value.isdigit()):
        raise OptionError(variable, value, "expected bytes in digits only; Mooncake ignores units silently")
    return int(value)
