"""Opening the tier: the folder on the disk, the books in memory, and whether these books are about those files."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local.disk.files import DiskFiles
from kvpool.stores.local.disk.folder import DiskFolder, DiskMeta
from kvpool.stores.local.disk.pool import DiskPool, drop_books, without_arena
from kvpool.stores.local.disk.rebuild import rebuild
from kvpool.stores.local.disk.record import scan
from kvpool.stores.local.geometry import geometry_for
from kvpool.stores.local.pool import prepare
from kvpool.stores.local.pool_dir import PoolDir

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK_S = 110.0  # as long as another process may need to read all records
_OPEN_S = 120.0
_BOOKS = "books"


def open_books(directory: PoolDir, settings: DiskSettings) -> DiskPool:
    """The books of the tier below the pool in ``directory``: joined, or made anew from the disk.

    OSError or ValueError with the reason in one line, also when the disk does not answer."""
    return _bounded(lambda: _open(directory, settings), close_books, f"{settings.folder}: the disk does not answer")


def close_books(books: DiskPool) -> None:
    books.close("keep")
    books.files.folder.close()


def _open(above: PoolDir, settings: DiskSettings) -> DiskPool:
    folder = DiskFolder(Path(settings.folder), above.path.name)
    directory: PoolDir | None = None
    try:
        directory = PoolDir(above.path, "disk")
        with folder.locked(_LOCK_S):
            pool = _attach(folder, directory, settings)
            try:
                folder.share()
            except BaseException:
                pool.close("keep")
                raise
            return pool
    except BaseException:
        folder.close()
        if directory is not None:
            directory.close()
        raise


def _attach(folder: DiskFolder, directory: PoolDir, settings: DiskSettings) -> DiskPool:
    geometry = geometry_for(settings.nbytes)
    alone, meta, books = folder.alone(), folder.read_disk_meta(), _read_books(directory)
    known = meta is not None and meta.attached == books != 0 and meta.nbytes == settings.nbytes
    if known and meta is not None:
        return _join(folder, directory, settings, meta)
    if not alone:
        raise OSError(errno.EBUSY, f"{folder.path} is in use by another pool: give this one a name or folder of its own")
    folder.sweep()
    if meta is None or meta.chunk_bytes != geometry.chunk_bytes:
        if meta is not None:
            logger.warning("%s: made for %d bytes; at %d nothing of it can be kept", folder.path, meta.nbytes, settings.nbytes)
        meta = DiskMeta(settings.nbytes, geometry.chunk_bytes, secrets.randbits(63) | 1)
    drop_books(directory)
    fresh = DiskMeta(settings.nbytes, geometry.chunk_bytes, meta.identity, secrets.randbits(63) | 1, meta.written_bytes)
    folder.write_disk_meta(DiskMeta(fresh.nbytes, fresh.chunk_bytes, fresh.identity, 0, fresh.written_bytes))
    pool = _join(folder, directory, settings, fresh)
    try:
        rebuild(pool, scan(pool.files.records, fresh.identity, geometry.units), fresh.written_bytes)
        _write_books(directory, fresh.attached)
        folder.write_disk_meta(fresh)  # last: until then the books count as unfinished
    except BaseException:
        pool.close("keep")
        raise
    return pool


def _join(folder: DiskFolder, directory: PoolDir, settings: DiskSettings, meta: DiskMeta) -> DiskPool:
    with directory.locked(_LOCK_S):
        geometry = prepare(directory, settings.nbytes)
        without_arena(directory)
        return DiskPool(directory, geometry, DiskFiles(folder, geometry, meta.identity))


def _read_books(directory: PoolDir) -> int:
    """The id of the books, 0 where there are none."""
    with suppress(FileNotFoundError, ValueError), os.fdopen(directory.open_file(_BOOKS, os.O_RDONLY), "rb") as file:
        return int(file.read(64), 16)
    return 0


def _write_books(directory: PoolDir, identity: int) -> None:
    with os.fdopen(directory.open_file(_BOOKS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(b"%x" % identity)


def _bounded(call: Callable[[], T], close: Callable[[T], None], text: str) -> T:
    """The result of a call on a thread of its own; TimeoutError with ``text`` when it takes too long: what comes of it then is
    closed."""
    result: list[T] = []
    errors: list[BaseException] = []
    lock, late = threading.Lock(), threading.Event()

    def run() -> None:
        try:
            made = call()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)
            return
        with lock:
            if not late.is_set():
                result.append(made)
        if not result:
            close(made)

    thread = threading.Thread(target=run, name="kvpool-disk-open", daemon=True)
    thread.start()
    thread.join(_OPEN_S)
    with lock:
        late.set()
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError(errno.ETIMEDOUT, text)
    return result[0]
