"""The SSD tiers: devices that UBS IO takes over, directories that the others write to."""

from __future__ import annotations

from kvpool.ops.doctor.facts.ssd import Directory, Ssd
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need
from kvpool.options.amounts import GIB
from kvpool.options.block_device import Disk
from kvpool.options.errors import OptionError
from kvpool.options.mooncake_ssd import LIMIT
from kvpool.options.ubsio import check_disk

AREA = "ssd"
DEVICE = Check(AREA, "device", "no partition, mount, holder or signature; no /dev/sdX", "storage.enabled of memcache")
DIRECTORY = Check(AREA, "directory", "absolute, there, writable, no symbolic link, no ..", "enable_ssd_offload")
ROOM = Check(AREA, "room", "the filesystem has room for what the tier may take", "enable_ssd_offload")
CHECKS = (DEVICE, DIRECTORY, ROOM)


def judge_ssd(facts: Ssd, need: Need) -> list[Finding]:
    found = [_device(name, disk, wiped=need.disks.wiped) for name, disk in facts.devices]
    for directory in facts.directories:
        found += _directory(directory, need)
    return found


def _device(name: str, disk: Disk, *, wiped: bool) -> Finding:
    """As the option rules judge it at start."""
    needed = "an empty block device that nobody uses"
    try:
        warnings = check_disk(name, disk, "", wiped=wiped)
    except OptionError as error:
        fix = "give another disk in ubsio.disk.path; look with lsblk, mount and blkid before anything is erased"
        return DEVICE.failure(str(error), needed, fix)
    if warnings:
        return DEVICE.unknown(warnings[0], needed, f"look as root: lsblk {name}; mount | grep {name}; blkid {name}")
    return DEVICE.ok(f"{name}, {(disk.nbytes or 0) / GIB:.0f} GiB", needed)


def _directory(directory: Directory, need: Need) -> list[Finding]:
    needed = "an absolute path of a writable directory without links"
    if directory.problem:
        fix = f"mkdir -p {directory.path or '<path>'}, writable for the engine's user, under its real path"
        return [DIRECTORY.failure(directory.problem, needed, fix)]
    found = [DIRECTORY.ok(directory.path, needed)]
    wanted = _wanted(need)
    if wanted is None or directory.total is None or directory.free is None:
        return found
    shown = f"{directory.free / GIB:.0f} of {directory.total / GIB:.0f} GiB free"
    size = f"{wanted / GIB:.1f} GiB"
    if wanted > directory.total:
        return [*found, ROOM.failure(shown, size, "lower the size of the tier, or take a larger disk")]
    if wanted > directory.free:
        return [*found, ROOM.warning(shown, size, "make room, or lower the size: what an earlier run left there may count as room")]
    return [*found, ROOM.ok(shown, size)]


def _wanted(need: Need) -> int | None:
    """What all ranks of this host may write there; None where nobody said."""
    if need.backend == "local":
        return need.options.local_ssd_size if need.options is not None else None
    limit = need.env.get(LIMIT, "")
    return int(limit) * need.ranks if limit.isascii() and limit.isdigit() else None
