"""The index: an LMDB environment, opened once per process, and its tables.

| table | key | value |
|---|---|---|
| objects | object key | ENTRY: unit, offset, nbytes, generation. Readable objects only |
| ready | unit | object key |
| reserved | unit | RESERVED: owner, generation, nbytes, then the object key (empty: anonymous) |
| writing | object key | unit, owner of the reservation |
| limbo | unit | LIMBO: may it come back, nbytes, generation, then the object key. Removed, but perhaps still being read |
| free | slot bytes, unit | nothing |
| tails | last part of the key | object keys that end so: the shards of one block |
| slabs | first chunk | SLAB: chunks, slot bytes, slots, slots ever used, retiring |
| meta | name | u64 |

A slot that was ever used stands in exactly one of ready, reserved, limbo, free. Units are big-endian, so tables sort by place.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
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

_TABLES = ("objects", "ready", "reserved", "writing", "limbo", "free", "tails", "slabs", "meta")
_MAX_READERS = 1024
MAX_KEY = 255
_OPEN_S = 10.0


@dataclass(slots=True)
class Environment:
    """An open index. ``exclusive_pid`` is False when a process of another PID namespace with our pid uses the pool: LMDB tells its
    readers apart by pid, so this process must then read inside write transactions."""

    path: Path
    identity: tuple[int, int]
    pid: int
    env: LmdbEnvironment
    tables: dict[str, LmdbTable]
    exclusive_pid: bool = True
    users: int = field(default=0)


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


def lock_file_nbytes() -> int:
    """How long LMDB makes its lock file; it must have memory before LMDB maps it."""
    return (_MAX_READERS + 2) * 64 + 4096


def acquire(path: Path, map_size: int) -> Environment:
    """Open the index at ``path``, or share it with another store of this process. OSError with the reason."""
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
            max_dbs=len(_TABLES) + 1,
            max_readers=_MAX_READERS,
            max_spare_txns=16,
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
        env.reader_check()
        exclusive = _may_read(env)
        tables = _open_tables(env)
    except lmdb.Error as error:
        env.close()
        raise OSError(errno.EIO, f"{path}: the index cannot be opened ({error})") from None
    return Environment(path, identity, os.getpid(), env, tables, exclusive)


def _open_tables(env: LmdbEnvironment) -> dict[str, LmdbTable]:
    """The tables. The binding keeps table handles only from a write transaction, and a process stopped inside one blocks all others
    without a timeout: hence a thread of its own and a deadline."""
    opened: dict[str, LmdbTable] = {}
    failed: list[BaseException] = []

    def work() -> None:
        try:
            opened.update({name: env.open_db(name.encode(), dupsort=name == "tails") for name in _TABLES})
        except (lmdb.Error, OSError) as error:  # told below
            failed.append(error)

    thread = threading.Thread(target=work, name="kvpool-index-open", daemon=True)
    thread.start()
    thread.join(_OPEN_S)
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise OSError(errno.EBUSY, "a stopped process holds the index: end it or let it go on")
    return opened


def _may_read(env: LmdbEnvironment) -> bool:
    """The first read transaction locks our pid's byte of the lock file; it fails while a namesake holds it."""
    try:
        env.begin().abort()
    except lmdb.ReadersFullError:
        raise
    except lmdb.Error as error:
        if os.strerror(errno.EAGAIN) in str(error) or os.strerror(errno.EACCES) in str(error):
            return False
        raise
    return True
