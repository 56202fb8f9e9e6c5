"""Memory of the host, of /dev/shm and of this process's control group."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvpool.ops.doctor.host import Host
from kvpool.stores.local.memory_limit import memory_limit

try:
    import resource
except ImportError:  # not on every system
    resource = None  # type: ignore[assignment]

SHM = "/dev/shm"
NO_LIMIT = 1 << 60  # the first version of control groups writes a number of this kind where there is no limit


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; None where unknown. ``shm_total`` and ``shm_free`` are of /dev/shm, ``pool`` is what the local pool has there already.

    ``cached`` is what dropping the page cache can free: without shared memory, which the kernel counts as cached too.
    ``limit`` is the lowest limit of the control groups, None where there is none; ``groups`` tells whether they can be seen.
    ``locked`` is how much a process may lock (-1: no limit)."""

    total: int | None = None
    free: int | None = None
    available: int | None = None
    cached: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    pool: int = 0
    limit: int | None = None
    groups: bool = False
    locked: int | None = None


def read_memory(host: Host, pool_folder: str = "") -> Memory:
    """``pool_folder`` is the local pool's, which may be there from an earlier run."""
    sizes = _meminfo(host.text("/proc/meminfo"))
    limit = memory_limit(host.place("/proc/self/cgroup"), host.place("/sys/fs/cgroup"))
    shm_total = shm_free = None
    with suppress(OSError):
        usage = shutil.disk_usage(host.place(SHM))
        shm_total, shm_free = usage.total, usage.free
    return Memory(
        total=sizes.get("MemTotal"),
        free=sizes.get("MemFree"),
        available=sizes.get("MemAvailable"),
        cached=max(0, sizes["Cached"] - sizes.get("Shmem", 0)) if "Cached" in sizes else None,
        shm_total=shm_total,
        shm_free=shm_free,
        pool=_allocated(Path(pool_folder)) if pool_folder else 0,
        limit=None if limit is None or limit >= NO_LIMIT else limit,
        groups=host.text("/proc/self/cgroup") is not None and bool(host.names("/sys/fs/cgroup")),
        locked=None if resource is None else _lockable(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    )


def _lockable(limit: int) -> int:
    return -1 if limit == resource.RLIM_INFINITY else limit


def _meminfo(text: str | None) -> dict[str, int]:
    found = {}
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) << 10
    return found


def _allocated(folder: Path) -> int:
    """Bytes that the files of a folder have on their filesystem."""
    found = 0
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found += os.stat(folder / name, follow_symlinks=False).st_blocks * 512
    return found
