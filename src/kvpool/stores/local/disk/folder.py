"""The folder of a pool on the disk: ``arena``, ``records``, ``meta`` and lock files. It may serve one pool at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpool.stores.local.pool_dir import PoolDir, check_local, open_dir

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class DiskMeta:
    """``identity`` stands in every record; ``attached`` names the books that know what is in the files; ``written_bytes`` counts
    what was ever written, now and then brought up to date."""

    nbytes: int
    chunk_bytes: int
    identity: int
    attached: int = 0
    written_bytes: int = 0


class DiskFolder(PoolDir):
    """``parent/name``: made if need be, 0700 and ours, on a filesystem of this host. OSError with the reason in one line."""

    def __init__(self, parent: Path, name: str) -> None:
        if os.path.realpath(parent) != str(parent):
            raise OSError(errno.ELOOP, f"{parent} is or passes through a symbolic link, or is not written plainly: not used")
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"the folder for the disk tier {parent} is not there, or no directory")
        self.path = parent / name
        try:
            self.fd = open_dir(self.path, private=True, create=True)
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror or f"{parent} is not writable") from None
        self._users = self._elected = -1
        try:
            check_local(self.fd, self.path)
            self._users = self.open_file("users", os.O_RDWR | os.O_CREAT)
        except OSError:
            self.close()
            raise

    def alone(self) -> bool:
        """Take the files for this process alone, for the time being; False when another one uses them."""
        return _flock(self._users, fcntl.LOCK_EX)

    def share(self) -> None:
        """Use the files together with the other processes of the pool, until ``close``."""
        if not _flock(self._users, fcntl.LOCK_SH):
            raise OSError(errno.EBUSY, f"{self.path} was taken by another pool just now")

    def elect(self) -> bool:
        """Become the process that writes to the disk, until ``resign``; False: another one is."""
        fd = self.open_file("demoter", os.O_RDWR | os.O_CREAT)
        if not _flock(fd, fcntl.LOCK_EX):
            os.close(fd)
            return False
        self._elected = fd
        return True

    def resign(self) -> None:
        fcntl.flock(self._elected, fcntl.LOCK_UN)
        os.close(self._elected)
        self._elected = -1

    def read_disk_meta(self) -> DiskMeta | None:
        """None where there is none, or a damaged one: what lies in the files is then unknown."""
        try:
            with os.fdopen(self.open_file("meta", os.O_RDONLY), "rb") as file:
                raw = json.loads(file.read(1 << 16))
            if raw.pop("format") != FORMAT:
                raise ValueError(f"{self.path} is of another version of kvpool: delete it, or choose another folder")
            return DiskMeta(**{name: int(raw[name]) for name in DiskMeta.__dataclass_fields__})
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError):
            logger.warning("%s: its meta file is damaged; what the disk holds is dropped", self.path)
            return None

    def write_disk_meta(self, meta: DiskMeta) -> None:
        """Whole or not at all."""
        aside = f"meta.{secrets.token_hex(4)}"
        with os.fdopen(self.open_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(json.dumps({"format": FORMAT, **asdict(meta)}).encode())
        os.replace(aside, "meta", src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sweep(self) -> None:
        """Remove what an interrupted ``write_disk_meta`` left. Only while ``alone``."""
        for name in os.listdir(self.fd):
            if name.startswith("meta."):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        if self._users >= 0:
            fcntl.flock(self._users, fcntl.LOCK_UN)  # a forked child may have the descriptor too
            os.close(self._users)
            self._users = -1
        super().close()

    def after_fork(self) -> None:
        """In a forked child: it is no user, and not elected."""
        fds = (self._users, self._elected)
        self._users = self._elected = -1  # a child of this child comes here again
        for fd in fds:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
