"""The directory of a pool: who may use it, its lock, its description."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FORMAT = 2
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def require_linux() -> None:
    """OSError, in one line, where the system lacks the calls that a pool is made of."""
    if sys.platform != "linux" or not all(hasattr(os, name) for name in ("posix_fallocate", "memfd_create")):
        raise OSError(f"the local store needs Linux (this is {platform.system() or sys.platform})")


def default_root() -> Path:
    return Path(f"/dev/shm/kvpool-{os.geteuid()}")


def boot_id() -> str:
    """Changes with every start of the host: what lies in an arena is worth nothing after that."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def check_owned(fd: int, path: Path, *, private: bool) -> None:
    """OSError unless ``fd`` belongs to this user and nobody else may write to it (``private``: nor read it)."""
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} belongs to uid {info.st_uid}, not to uid {os.geteuid()}: not used")
    if stat.S_IMODE(info.st_mode) & (0o077 if private else 0o022):
        raise PermissionError(
            errno.EPERM, f"{path} has mode {stat.S_IMODE(info.st_mode):o}: others could change the pool; chmod it"
        )


_REMOTE = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x0BD00BD0: "Lustre",
}
_fstatfs = ctypes.CDLL(None, use_errno=True).fstatfs


def filesystem_type(fd: int) -> int:
    """The magic number of the filesystem, 0 where it cannot be told."""
    buffer = (ctypes.c_long * 64)()  # struct statfs begins with f_type, a long
    return int(buffer[0]) & 0xFFFFFFFF if _fstatfs(fd, buffer) == 0 else 0


def check_local(fd: int, path: Path) -> None:
    """OSError on filesystems that other hosts share: their locks and mappings do not do what a pool needs."""
    kind = _REMOTE.get(filesystem_type(fd))
    if kind is not None:
        raise OSError(errno.ENOTSUP, f"{path} lies on {kind}: a pool needs a filesystem of this host, such as /dev/shm")


def open_dir(path: Path, *, private: bool, create: bool) -> int:
    """A descriptor of a directory of ours that is no link, made if need be. OSError with the reason."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(error.errno, f"{path} is a symbolic link or no directory: not used") from None
        raise
    try:
        check_owned(fd, path, private=private)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_below(fd: int, names: list[str]) -> None:
    """Remove files and directories of an open directory, following no link."""
    for name in names:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            continue
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=fd)
        try:
            _remove_below(inner, os.listdir(inner))
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=fd)


class PoolDir:
    """The open directory ``root/name``. Every file in it is opened by name below its descriptor, never through a link."""

    def __init__(self, root: Path | None, name: str, *, create: bool = True) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"pool name {name!r}: 1 to 64 of A-Z a-z 0-9 . _ -, not starting with . or -")
        base = default_root() if root is None else root
        above = open_dir(base, private=root is None, create=create)
        try:
            check_local(above, base)
        finally:
            os.close(above)
        self.path = base / name
        self.fd = open_dir(self.path, private=True, create=create)
        try:
            check_local(self.fd, self.path)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def open_file(self, name: str, flags: int = os.O_RDWR, mode: int = 0o600) -> int:
        fd = os.open(name, flags | _FLAGS, mode, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, f"{self.path / name} is no regular file")
        return fd

    def make_dir(self, name: str) -> int:
        """A private directory below this one; a descriptor of it."""
        return open_dir(self.path / name, private=True, create=True)

    def is_current(self, lock: int) -> bool:
        """False when the directory, or its lock file, has been removed since it was opened."""
        try:
            here = os.stat(self.path, follow_symlinks=False)
            named = os.stat("lock", dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(here, os.fstat(self.fd)) and os.path.samestat(named, os.fstat(lock))

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the pool's lock (joining, leaving, creating). TimeoutError when another process keeps it longer than ``timeout_s``,
        FileNotFoundError when the pool was removed meanwhile."""
        fd = self.open_file("lock", os.O_RDWR | os.O_CREAT)
        try:
            end = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise TimeoutError(errno.ETIMEDOUT, f"{self.path}: another process keeps the lock of the pool") from None
                    time.sleep(0.005)
            if not self.is_current(fd):
                raise FileNotFoundError(errno.ENOENT, f"{self.path} was removed meanwhile")
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the descriptor too
            os.close(fd)

    def read_meta(self) -> dict[str, object] | None:
        """What the creator wrote, None where there is no pool yet; of an older format only ``format``. ValueError for a newer one
        or a damaged file."""
        try:
            fd = self.open_file("meta", os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            raw = file.read(1 << 16)
        advice = f"stop its users, delete the directory {self.path} and start again"
        try:
            meta = json.loads(raw)
            version, size, chunk = meta["format"], meta["dram_bytes"], meta["chunk_bytes"]
            sound = isinstance(size, int) and isinstance(chunk, int) and 0 < chunk <= size
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"pool {self.path}: its meta file is damaged; {advice}") from None
        if isinstance(version, int) and version < FORMAT:
            return {"format": version}
        if version != FORMAT:
            raise ValueError(f"pool {self.path} has format {version}, this version of kvpool reads format {FORMAT}; {advice}")
        if not sound:
            raise ValueError(f"pool {self.path}: its meta file is damaged; {advice}")
        return dict(meta)

    def write_meta(self, meta: dict[str, object]) -> None:
        """Written last when a pool is made: a pool without it was never finished."""
        fd = self.open_file("meta.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps({"format": FORMAT, **meta}).encode())
        os.replace("meta.new", "meta", src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def wipe(self, *, keep_lock: bool) -> None:
        """Remove every file of the pool (with ``keep_lock`` all but the lock, which the caller holds)."""
        names = sorted(os.listdir(self.fd), key=lambda name: (name == "lock", name != "meta"))
        _remove_below(self.fd, [name for name in names if not (name == "lock" and keep_lock)])

    def remove(self) -> None:
        """Remove the pool and its directory; the caller holds the lock and knows that nobody uses it."""
        self.wipe(keep_lock=False)
        with suppress(OSError):  # somebody who joins just now has made a new lock file: the directory is theirs
            os.rmdir(self.path)
