"""The SSD tier of MemCache (UBS IO): its disks, memory and counts, checked before the library takes the disks over."""

from __future__ import annotations

import re

from kvpool.options.amounts import GIB, MIN_UBSIO_GB, most_ubsio_gb
from kvpool.options.block_device import Disk
from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.memcache_conf import LOCAL, LocalConf

NOT_RUN = "storage.enabled: the SSD tier of MemCache is handed to the library as it is; kvpool was never run with it"


def check_ubsio(conf: LocalConf, path: str, deployment: Deployment) -> list[str]:
    """Warnings; OptionError for what would not start, or would wipe something."""
    if not conf.disk_path:
        raise OptionError("ubsio.disk.path", None, "is required with storage.enabled", where=path)
    if conf.ubsio_memory_gb < MIN_UBSIO_GB:
        reason = f"must be at least {MIN_UBSIO_GB} with storage.enabled"
        raise OptionError("ubsio.mem.size_in_gb", conf.ubsio_memory_gb, reason, where=path)
    _check_count(conf, path, deployment)
    warnings = [NOT_RUN]
    if conf.dram_size == 0:
        warnings.append(f"storage.enabled has no effect in a process with {LOCAL}.dram.size 0GB")
    if not conf.force_new_disk:
        warnings.append("ubsio.standalone.force_new_disk=false: what is on the disks cannot be recovered yet; set true")
    disks = conf.disk_path.split(":")
    if twice := sorted({disk for disk in disks if disks.count(disk) > 1}):
        raise OptionError("ubsio.disk.path", conf.disk_path, f"names {twice[0]} twice", where=path)
    for disk in disks:
        warnings += check_disk(disk, deployment.host.disk(disk), path, wiped=conf.force_new_disk)
    return warnings + _check_memory(conf, deployment)


def _check_count(conf: LocalConf, path: str, deployment: Deployment) -> None:
    if conf.device_count is None:
        reason = "is required with storage.enabled: the number of local services on this host whose dram.size is not 0"
        raise OptionError("ubsio.standalone.device_count", None, reason, where=path)
    here = deployment.local_ranks
    if here is not None and conf.dram_size != 0 and conf.device_count != here:
        reason = f"but {here} local services of this engine give memory: set {here}"
        raise OptionError("ubsio.standalone.device_count", conf.device_count, reason, where=path)


def check_disk(name: str, disk: Disk, path: str, *, wiped: bool) -> list[str]:
    """Is the disk ``name`` free for UBS IO? ``wiped``: what is on it will be lost. Warnings; OptionError where it is not."""

    def refuse(reason: str) -> OptionError:
        return OptionError("ubsio.disk.path", name, reason, where=path)

    if re.fullmatch(r"/dev/sd[a-z]+[0-9]*", name):
        raise refuse(
            "names of this kind move from disk to disk between boots: use an NVMe disk, a partition of one or a loop device"
        )
    if disk.kind == "missing":
        raise refuse("does not exist")
    if disk.kind != "block device":
        raise refuse("is no block device: give a disk, a partition or a loop device")
    if disk.nbytes == 0:
        raise refuse("has no size: a loop device needs a file (losetup), a disk its medium")
    if disk.mounted_at:
        raise refuse(f"is mounted at {disk.mounted_at}: it must belong to UBS IO alone")
    if disk.held_by:
        raise refuse(f"is in use by {disk.held_by}: it must belong to UBS IO alone")
    if disk.partitions or disk.signature:
        what = f"{disk.partitions} partitions" if disk.partitions else str(disk.signature)
        fate = ", which force_new_disk=true would destroy" if wiped else ""
        raise refuse(f"holds something ({what}){fate}: empty it first, or give another disk")
    if disk.signature is None:
        return [f"ubsio.disk.path={name} cannot be read, so nobody knows whether it is empty"]
    return []


def _check_memory(conf: LocalConf, deployment: Deployment) -> list[str]:
    free, count = deployment.host.memory_available(), conf.device_count or 1
    if free is None:
        return []
    most = most_ubsio_gb(free, count)
    if conf.ubsio_memory_gb <= most:
        return []
    advice = f"set at most {most}" if most >= MIN_UBSIO_GB else "free memory, or run fewer local services with memory"
    return [
        f"ubsio.mem.size_in_gb={conf.ubsio_memory_gb}: {count} local services take {conf.ubsio_memory_gb * count} GB, but "
        f"{free / GIB:.0f} GB are free: {advice}"
    ]
