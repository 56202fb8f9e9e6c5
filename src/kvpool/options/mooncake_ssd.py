"""The disk tier of Mooncake: its directory and the environment variables that only Mooncake reads, checked before it starts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import PurePosixPath

from kvpool.options.amounts import GIB, whole_gib
from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.scalars import read_duration, read_size

BUFFER = "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES"
LIMIT = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"
QUOTA = "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"
POLICY = "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY"
BUCKET = "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"
HEARTBEAT = "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"
CLIENT_TTL = "KVPOOL_MOONCAKE_CLIENT_TTL"
MAX_CLIENT_TTL_S = 600
READERS = 4  # loads of one process at one time
USABLE = 0.9  # of the buffer, for these loads together
DEFAULTS = {BUFFER: 1342177280, QUOTA: 0, LIMIT: 2199023255552}
DEFAULT_CLIENT_TTL_S = 10.0


def check_ssd(
    directory: str | None, path: str, env: Mapping[str, str], deployment: Deployment, *, fabric: bool = False
) -> list[str]:
    """Warnings; OptionError for what would fail or be ignored later. ``fabric``: fabric memory is on."""
    checked = check_directory(directory, path)
    sizes = {variable: _read_bytes(variable, env) for variable in DEFAULTS}
    _check_rhythm(env)
    policy = env.get(POLICY, "none")
    if policy not in ("none", "fifo", "lru"):
        raise OptionError(POLICY, policy, "expected none, fifo or lru")
    if fabric and sizes[BUFFER] % GIB:
        whole = whole_gib(sizes[BUFFER]) * GIB
        raise OptionError(BUFFER, sizes[BUFFER], f"is not a multiple of 1GB, which fabric memory needs: set {whole}")
    disk_nbytes = shutil.disk_usage(checked).total
    warnings = capacity_warnings(sizes[LIMIT], deployment.ranks_here, disk_nbytes)
    warnings += quota_warnings(sizes[QUOTA], deployment.ranks_here, disk_nbytes)
    if policy == "none":
        warnings.append(f"{POLICY} is none: nothing more is written to the disk once its quota is full; set lru or fifo")
    return warnings


def buffer_nbytes(env: Mapping[str, str]) -> int:
    """The staging buffer of the disk tier, per rank."""
    return _read_bytes(BUFFER, env)


def least_buffer(object_nbytes: int) -> int:
    """The smallest staging buffer with which objects of that size can be loaded: one for each of the loads at one time."""
    return math.ceil(object_nbytes * READERS / USABLE)


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
    if limit * ranks <= disk_nbytes:
        return []
    gb = f"{ranks} x {limit / GIB:.0f} GB is more than the {disk_nbytes / GIB:.0f} GB of the disk"
    most = disk_nbytes // ranks
    return [f"{LIMIT}: {gb}; writes fail when it is full although monitoring shows room; set at most {most}"]


def quota_warnings(quota: int, ranks: int, disk_nbytes: int) -> list[str]:
    """A warning where the quotas of all ranks add up to more than the disk they share; 0 is 90 % of it for each rank."""
    each = quota or disk_nbytes * 9 // 10
    if each * ranks <= disk_nbytes:
        return []
    meaning = "0 (90 % of the disk)" if quota == 0 else f"{quota / GIB:.0f} GB"
    return [
        f"{QUOTA}: {ranks} ranks share the disk of {disk_nbytes / GIB:.0f} GB, and each may take {meaning}; "
        f"set at most {disk_nbytes // ranks}"
    ]


def client_ttl_s(env: Mapping[str, str]) -> float:
    """How long a process waits after a crash; OptionError where that is no time."""
    text = env.get(CLIENT_TTL) or str(DEFAULT_CLIENT_TTL_S)
    try:
        seconds = float(text)
        if 0 <= seconds <= MAX_CLIENT_TTL_S:
            return seconds
    except ValueError:
        pass
    reason = f"expected seconds from 0 to {MAX_CLIENT_TTL_S}, the --client_ttl of the master{_seconds_meant(text)}"
    raise OptionError(CLIENT_TTL, text, reason)


def _check_rhythm(env: Mapping[str, str]) -> None:
    """When something is written and reported, and how long a crash costs; OptionError for what would be ignored."""
    if BUCKET in env and _read_bytes(BUCKET, env) == 0:
        raise OptionError(BUCKET, env[BUCKET], "expected at least 1: a bucket of no bytes is refused by Mooncake, late")
    text = env.get(HEARTBEAT, "1")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        reason = f"expected seconds in digits only, at least 1; Mooncake ignores units silently{_seconds_meant(text)}"
        raise OptionError(HEARTBEAT, text, reason)
    client_ttl_s(env)


def _seconds_meant(text: str) -> str:
    """What to write for a number with a unit."""
    try:
        return f": set {max(1, read_duration(text) // 1000)}" if not text.strip().isdigit() else ""
    except ValueError:
        return ""


def _read_bytes(variable: str, env: Mapping[str, str]) -> int:
    value = env.get(variable, str(DEFAULTS.get(variable, "")))
    if value.isascii() and value.isdigit():
        return int(value)
    try:
        meant = f": set {read_size(value)}"
    except ValueError:
        meant = ""
    raise OptionError(variable, value, f"expected bytes in digits only; Mooncake ignores units silently{meant}")
