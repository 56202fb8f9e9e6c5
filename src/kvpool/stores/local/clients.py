"""The processes that have a pool open. Each holds a lock on its own file ``clients/<id>``: while it is held the client lives.
Process ids say nothing here, they differ between containers. The file is also the client's lease array (see leases.py).

Files can be removed under living clients (rm -rf, RemoveIPC). A client whose file was seen before counts while its lock is held,
listed or not; one that misses its own file can no longer see everybody: it reads on, but frees no slot that others may use."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_PAGE_UNITS = 512  # int64 stamps in one page

Mask = NDArray[np.bool_]
Units = NDArray[np.int64]


class Removed(Exception):
    """The files of the pool were deleted while it was in use."""

    def __init__(self) -> None:
        super().__init__("the pool was removed while in use")


def _name(client: int) -> str:
    return f"{client:016x}"


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(fd: int) -> bool:
    """By another one. What this look locks is let go of at once, and not by closing: a child forked meanwhile has it too, and the
    dead would live on in it."""
    if not _lock(fd):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def open_array(directory: int, client: int) -> int:
    """Another descriptor of a client file, to map it by: one that shares the lock would keep it in forked children."""
    return os.open(_name(client), os.O_RDWR | _FLAGS, dir_fd=directory)


def join(directory: int, nbytes: int) -> tuple[int, int]:
    """Make a client file; its id and its locked descriptor. It gets its name when it is locked, so nobody takes it for a dead
    one."""
    client = secrets.randbits(63) | 1
    fd = os.open(f"new-{_name(client)}", os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, nbytes)
        os.rename(f"new-{_name(client)}", _name(client), src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.close(fd)
        raise
    return client, fd


def leave(directory: int, client: int, fd: int) -> None:
    """End the lock (others that know the file would take the client for a living one), then remove the file."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    with suppress(FileNotFoundError):
        os.unlink(_name(client), dir_fd=directory)


def names_in(directory: int) -> list[str]:
    """What is in an open directory. Through a descriptor of its own: those who list through one share its position, and of two
    threads that do so at one time each misses entries."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=directory)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def any_alive(directory: int) -> bool:
    """Does anybody hold a lock in this directory?"""
    for name in names_in(directory):
        fd = os.open(name, os.O_RDWR | _FLAGS, dir_fd=directory)
        try:
            if _is_locked(fd):
                return True
        finally:
            os.close(fd)
    return False


class Peers:
    """The clients of a pool as seen by one of them. Used by its writer thread only, except ``removed`` and ``count``."""

    def __init__(self, directory: int, me: int) -> None:
        self._directory = directory
        self._me = me
        self._fds: dict[int, int] = {}
        self._living: list[int] = []
        self._removed = False

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _listed(self) -> list[int]:
        return [int(name, 16) for name in names_in(self._directory) if len(name) == 16]

    def count(self) -> int:
        """How many are alive, this one included; one that is just joining may be missing."""
        living = 0
        for client in self._listed():
            try:
                fd = open_array(self._directory, client)
            except FileNotFoundError:
                continue
            living += _is_locked(fd)
            os.close(fd)
        return living

    def removed(self) -> bool:
        """Was our own client file deleted, and so perhaps those of clients that we never saw?"""
        if not self._removed:
            try:
                os.stat(_name(self._me), dir_fd=self._directory, follow_symlinks=False)
            except FileNotFoundError:
                self._removed = True
        return self._removed

    def check(self) -> None:
        """Removed when nothing can be known about the other clients any more."""
        if self.removed():
            raise Removed

    def _fd(self, client: int) -> int | None:
        fd = self._fds.get(client)
        if fd is None:
            try:
                fd = open_array(self._directory, client)
            except FileNotFoundError:
                return None
            self._fds[client] = fd
        return fd

    def alive(self, client: int) -> bool:
        """Does the client hold its lock?"""
        if client == self._me:
            return True
        fd = self._fd(client)
        if fd is None:
            return False
        return _is_locked(fd)

    def refresh(self) -> list[int]:
        """Look who lives now. A client that joins later finds only what the index then holds."""
        listed = self._listed()
        self._removed = self._removed or self._me not in listed
        known = set(listed) | self._fds.keys()
        living = [client for client in known if self.alive(client)]
        for client in known - set(listed) - set(living):
            os.close(self._fds.pop(client))
        self._living = living
        return living

    def living(self) -> frozenset[int]:
        """As of the last ``refresh``."""
        return frozenset(self._living)

    def bury(self) -> int:
        """Remove the files of the dead; how many. Only under the pool's lock, after their reservations were taken back."""
        buried = 0
        for client in self._listed():
            if not self.alive(client):
                with suppress(FileNotFoundError):
                    os.unlink(_name(client), dir_fd=self._directory)
                buried += 1
        for name in names_in(self._directory):
            if name.startswith("new-"):
                os.unlink(name, dir_fd=self._directory)
        return buried

    def stamps(self, units: Units) -> Units:
        """The latest stamp of any client that lived at the last ``refresh``, for each unit; 0 where there is none.

        Read with pread, not through a mapping: a mapped read of a hole would take memory, or a SIGBUS where there is none.
        """
        latest = np.zeros(len(units), dtype=np.int64)
        if not len(units):
            return latest
        pages, place = np.unique(units // _PAGE_UNITS, return_inverse=True)
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
        within = units % _PAGE_UNITS
        for client in self._living:
            fd = self._fd(client)
            if fd is None:
                continue
            raw = b"".join(_read(fd, int(run[0]), len(run)) for run in runs)
            table = np.frombuffer(raw, dtype=np.int64).reshape(-1, _PAGE_UNITS)
            np.maximum(latest, table[place, within], out=latest)
        return latest


def _read(fd: int, page: int, pages: int) -> bytes:
    nbytes = pages * _PAGE_UNITS * 8
    raw = os.pread(fd, nbytes, page * _PAGE_UNITS * 8)
    return raw.ljust(nbytes, b"\0")
