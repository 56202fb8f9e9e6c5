"""What lies on a disk, from the kernel's own files and the first bytes: nothing is written, no command is run."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HEAD = 0x10048
_MAGICS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"XFSB", "xfs"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (3, b"NTFS    ", "ntfs"),
    (0x438, b"\x53\xef", "ext"),
    (0x400, b"\x10\x20\xf5\xf2", "f2fs"),
    (0x218, b"LVM2 001", "LVM"),
    (0x1018, b"LVM2 001", "LVM"),
    (4096, b"\xfc\x4e\x2b\xa9", "RAID member"),
    (4086, b"SWAPSPACE2", "swap"),
    (0x10040, b"_BHRfS_M", "btrfs"),
    (512, b"EFI PART", "a partition table"),
    (4096, b"EFI PART", "a partition table"),
    (510, b"\x55\xaa", "a boot sector or partition table"),
)


@dataclass(frozen=True, slots=True)
class Disk:
    """Facts about a path. ``signature`` is what its first bytes are of: "" for nothing known, None where nobody could look;
    ``nbytes`` its size, None where that is not known."""

    kind: Literal["block device", "missing", "other"]
    mounted_at: str = ""
    partitions: int = 0
    held_by: str = ""
    signature: str | None = ""
    nbytes: int | None = None


def signature_of(head: bytes) -> str:
    """The file system, volume or table that the first ``HEAD`` bytes of a disk belong to; "" where none is known."""
    for offset, magic, name in _MAGICS:
        if head[offset : offset + len(magic)] == magic:
            return name
    return ""


def look(path: str, root: str = "/") -> Disk:
    """The facts about ``path``. ``root`` is where /proc and /sys lie."""
    try:
        status = os.stat(path)
    except OSError:
        return Disk("missing")
    if not stat.S_ISBLK(status.st_mode):
        return Disk("other")
    return in_use(path, os.major(status.st_rdev), os.minor(status.st_rdev), Path(root), _read_signature(path))


def in_use(path: str, major: int, minor: int, root: Path, signature: str | None) -> Disk:
    """Mounts, partitions and holders of block device ``major:minor``."""
    folder = root / "sys" / "dev" / "block" / f"{major}:{minor}"
    partitions, holders = 0, []
    with suppress(OSError):
        partitions = sum((entry / "partition").exists() for entry in folder.iterdir())
    with suppress(OSError):
        holders = sorted(entry.name for entry in (folder / "holders").iterdir())
    nbytes = None
    with suppress(OSError, ValueError):
        nbytes = int((folder / "size").read_text()) * 512
    if path in _first_words(root / "proc" / "swaps"):
        holders.append("swap")
    mounted_at = _mounted_at(root / "proc" / "self" / "mountinfo", path, f"{major}:{minor}")
    return Disk("block device", mounted_at, partitions, ", ".join(holders), signature, nbytes)


def _read_signature(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as disk:
            return signature_of(disk.read(HEAD))
    except OSError:
        return None


def _mounted_at(mountinfo: Path, path: str, number: str) -> str:
    """Where the device is mounted, by its number or, for file systems with numbers of their own, by its name."""
    with suppress(OSError):
        for line in mountinfo.read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            words, source = left.split(), right.split()[1:2]
            if len(words) > 4 and (words[2] == number or source == [path]):
                return words[4]
    return ""


def _first_words(path: Path) -> list[str]:
    with suppress(OSError):
        return [line.split()[0] for line in path.read_text(errors="replace").splitlines() if line.split()]
    return []
