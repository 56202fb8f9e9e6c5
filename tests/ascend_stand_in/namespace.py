"""A private mount namespace in which there is an Ascend driver and an empty /dev/shm; the real folders stay as they are."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def enter(home: Path, room: Path) -> None:
    """Move this process, which must be root's, into a new namespace. ``room`` is an empty folder to mount things on."""
    if _libc.unshare(CLONE_NEWNS) != 0:
        raise _error("no mount namespace of its own (the stand-in needs root)")
    _mount("none", Path("/"), "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", Path("/dev/shm"), "tmpfs", 0, "mode=1777,size=2g")
    _add_entry(Path("/usr/local"), "Ascend", home, room)


def run(command: Sequence[str], home: Path, room: Path) -> None:
    """Become ``command``, in such a namespace."""
    enter(home, room)
    os.execvpe(command[0], list(command), environment(home))


def environment(home: Path) -> dict[str, str]:
    """The variables with which the libraries find the stand-in, added to those of this process."""
    library_path = os.environ.get("LD_LIBRARY_PATH", "")
    libraries = f"{home / 'lib64'}:{library_path}".rstrip(":")
    return {**os.environ, "ASCEND_HOME_PATH": str(home), "LD_LIBRARY_PATH": libraries}


def _add_entry(folder: Path, name: str, source: Path, room: Path) -> None:
    """``folder/name`` shows ``source``: the folder is replaced by a small one that shows its real entries and this one."""
    _mount("tmpfs", room, "tmpfs", 0, "mode=755,size=1m")
    for entry in folder.iterdir():
        if entry.name == name:
            continue
        twin = room / entry.name
        if entry.is_symlink():
            twin.symlink_to(entry.readlink())
        elif entry.is_dir():
            twin.mkdir()
            _mount(str(entry), twin, "", MS_BIND | MS_REC)
        else:
            twin.touch()
            _mount(str(entry), twin, "", MS_BIND)
    (room / name).mkdir()
    _mount(str(source), room / name, "", MS_BIND)
    _mount(str(room), folder, "", MS_BIND | MS_REC)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    if _libc.mount(source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        raise _error(f"cannot mount {source} on {target}")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
