"""Disks and directories of the SSD tiers."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvpool.ops.doctor.host import Host, within
from kvpool.ops.doctor.raw import Disks
from kvpool.options.block_device import Disk
from kvpool.options.errors import OptionError
from kvpool.options.mooncake_ssd import check_directory

LOOK_S = 10.0
UNREADABLE = Disk("block device", signature=None)


@dataclass(frozen=True, slots=True)
class Directory:
    """``problem`` is the line that says why it is unfit, "" where it is fit; ``total`` and ``free`` bytes of its filesystem."""

    path: str
    problem: str = ""
    total: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Ssd:
    """The directories and devices that the configuration names."""

    directories: tuple[Directory, ...] = ()
    devices: tuple[tuple[str, Disk], ...] = ()


def read_ssd(host: Host, disks: Disks) -> Ssd:
    """A filesystem or disk that does not answer in time is a problem, or unknown; it does not hold doctor up."""
    return Ssd(
        tuple(_in_time(path) for path in disks.directories),
        tuple((path, within(LOOK_S, partial(host.probe().disk, path)) or UNREADABLE) for path in disks.devices),
    )


def _in_time(path: str) -> Directory:
    silent = OptionError("ssd_offload_path", path, f"its filesystem does not answer within {LOOK_S:g} s")
    return within(LOOK_S, partial(read_directory, path)) or Directory(path, str(silent))


def read_directory(path: str) -> Directory:
    """The directory as the stores judge it: absolute, there, writable, no links on the way."""
    try:
        plain = check_directory(path, "")
    except OptionError as error:
        return Directory(path, str(error))
    with suppress(OSError):
        usage = shutil.disk_usage(plain)
        return Directory(path, "", usage.total, usage.free)
    return Directory(path)
