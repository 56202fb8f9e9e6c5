"""The index: an LMDB environment, opened once per process, and its tables.

| table | key | value |
|---|---|---|
| objects | object key | ENTRY: unit, offset, nbytes, generation. Readable objects only; the main table |
| ready | unit | object key |
| reserved | unit | RESERVED: owner, generation, nbytes, then the object key (empty: anonymous) |
| writing | object key | unit, owner of the reservation |
| limbo | unit | LIMBO: may it come back, nbytes, generation, then the object key. Removed, but perhaps still being read |
| free | slot bytes, unit | nothing |
| tails | last part of the key | object keys that end so: the shards of one block |
| slabs | first chunk | SLAB: chunks, slot bytes, slots, slots ever used, retiring |
| meta | name | u64 |

It is opened without LMDB's locks: readers.py and write_lock.py stand in for them.

A slot that was ever used stands in exactly one of ready, reserved, limbo, free. Units are big-endian, so tables sort by place.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

ENTRY = struct.Struct("<QQQQ")
RESERVED = struct.Struct("<QQQ")
LIMBO = struct.Struct("<BQQ")
SLAB = struct.Struct("<QQQQB")
UNIT = struct.Struct(">Q")
WRITING = struct.Struct(">QQ")
FREE = struct.Struct(">QQ")

# The library has no types.
LmdbEnvironment = Any
LmdbTransaction = Any
LmdbTable = Any
LmdbCursor = Any

_NAMED = ("ready", "reserved", "writing", "limbo", "free", "tails", "slabs", "meta")
NAMED_TABLES = len(_NAMED)
MAX_KEY = 255
# What readers.py knows of LMDB holds for 0.9; from 3 on the binding has 1.0 too, and a variable of the environment that chooses.
_LMDB_0_9: dict[str, Any] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}


@dataclass(slots=True)
class Environment:
    """An open index. ``objects`` can be read at once; ``tables`` is empty until ``open_tables``."""

    path: Path
    identity: tuple[int, int]
    pid: int
    env: LmdbEnvironment
    objects: LmdbTable
    tables: dict[str, LmdbTable] = field(default_factory=dict)
    users: int = 0


_open: dict[tuple[int, int], Environment] = {}
_lock = threading.Lock()
_inherited: list[Environment] = []  # of the parent: never closed here, closing would disturb the parent's readers


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_open.values())
    _open.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def map_size_for(units: int) -> int:
    """Address space for the index (not memory): some 600 bytes for each slot of the smallest class, within limits."""
    return min(max(256 << 20, units * 600), 16 << 30)


def acquire(path: Path, map_size: int) -> Environment:
    """Open the index at ``path``, or share it with another store of this process. Under the pool's lock. OSError with why."""
    info = os.stat(path, follow_symlinks=False)
    identity = (info.st_dev, info.st_ino)
    with _lock:
        found = _open.get(identity)
        if found is None:
            found = _open[identity] = _open_environment(path, identity, map_size)
        found.users += 1
        return found


def release(environment: Environment) -> None:
    """The last user in this process closes it. Does nothing in a forked child."""
    with _lock:
        environment.users -= 1
        if environment.users == 0 and environment.pid == os.getpid():
            _open.pop(environment.identity, None)
            environment.env.close()


def _open_environment(path: Path, identity: tuple[int, int], map_size: int) -> Environment:
    try:
        env = lmdb.open(
            str(path),
            map_size=map_size,
            max_dbs=NAMED_TABLES,
            max_spare_txns=16,
            lock=False,
            **_LMDB_0_9,
            sync=False,
            metasync=False,
            mode=0o600,
            create=True,
        )
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise OSError(
                errno.EBUSY, f"{path}: opened before this process was forked; start worker processes with 'spawn'"
            ) from None
        raise OSError(errno.EIO, f"{path}: the index cannot be opened ({error})") from None
    try:
        objects = env.open_db(None)
    except lmdb.Error as error:
        env.close()
        raise OSError(errno.EIO, f"{path}: the index cannot be opened ({error})") from None
    return Environment(path, identity, os.getpid(), env, objects)


def open_tables(environment: Environment) -> None:
    """Make or open the named tables; called by writer threads that hold the write lock: the binding keeps table handles only from a
    write transaction. Readers need none of them, so a stopped process cannot keep others from joining and reading."""
    if not environment.tables:
        env = environment.env
        # A transaction of our own: open_db begins one with the interpreter lock held, and would freeze the whole process.
        with env.begin(write=True) as txn:
            opened = {name: env.open_db(_name_of(name), txn, dupsort=name == "tails") for name in _NAMED}
        environment.tables = {"objects": environment.objects, **opened}


def _name_of(table: str) -> bytes:
    """Tables are named inside the main table, which is ``objects``: longer than any object key, so never taken for one."""
    return f"kvpool-table-{table}".encode().ljust(MAX_KEY + 10, b".")


@contextmanager
def copied(
    environment: Environment, read: Callable[[Callable[[LmdbTransaction], None]], None]
) -> Iterator[tuple[Environment, Any]]:
    """A private copy of one snapshot, taken inside ``read``, and a transaction on it."""
    fd = os.memfd_create("kvpool-index", os.MFD_CLOEXEC)
    try:
        read(lambda txn: environment.env.copyfd(fd, compact=True, txn=txn))
        with lmdb.open(f"/proc/self/fd/{fd}", subdir=False, readonly=True, lock=False, max_dbs=NAMED_TABLES) as env:
            tables = {name: env.open_db(_name_of(name), create=False) for name in _NAMED}
            copy = Environment(environment.path, (0, 0), os.getpid(), env, env.open_db(None))
            copy.tables = {"objects": copy.objects, **tables}
            with env.begin() as txn:
                yield copy, txn
    finally:
        os.close(fd)
