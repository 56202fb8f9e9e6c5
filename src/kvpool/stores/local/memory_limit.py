"""How much memory this process's control group may use: the pages of an arena count against the group that touches them first."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def memory_limit(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest limit of the group and those above it, as far as they can be seen; None without one."""
    limits: list[int] = []
    with suppress(OSError, ValueError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits.extend(_limits(mounted, path, "memory.max"))
            elif "memory" in controllers.split(","):
                limits.extend(_limits(mounted / "memory", path, "memory.limit_in_bytes"))
    return min(limits, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Of a group and its parents; a container may see its own group as the root."""
    found = []
    folder = root / path.lstrip("/")
    for group in [folder, *folder.parents]:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int((group / name).read_text(encoding="ascii")))
        if group == root:
            break
    return found


def warn_if_over_limit(name: str, dram_bytes: int) -> None:
    limit = memory_limit()
    if limit is not None and dram_bytes > limit:
        logger.warning(
            "pool %s may grow to %d MiB, but the memory limit of this control group is %d MiB: the kernel may kill its users",
            name,
            dram_bytes >> 20,
            limit >> 20,
        )
