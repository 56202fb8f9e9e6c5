"""A pool as one process has it open: the parts of the package put together. Not the store itself (store.py)."""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import lmdb

from kvpool.stores.local import clients, index
from kvpool.stores.local.allocator import Allocator
from kvpool.stores.local.arena import Arena, Stamps
from kvpool.stores.local.eviction import Evictor
from kvpool.stores.local.fence import Fence, make_fence
from kvpool.stores.local.geometry import Geometry, geometry_for
from kvpool.stores.local.ghosts import Ghosts
from kvpool.stores.local.index import LmdbTransaction
from kvpool.stores.local.leases import Leases
from kvpool.stores.local.memory_limit import warn_if_over_limit
from kvpool.stores.local.pool_dir import FORMAT, PoolDir, boot_id, default_root, require_linux
from kvpool.stores.local.prefault import Prefaulter
from kvpool.stores.local.readers import TABLE_BYTES, Readers
from kvpool.stores.local.records import Records
from kvpool.stores.local.slabs import SlabTable
from kvpool.stores.local.write_lock import WriteLock
from kvpool.stores.local.writer import Overdue, WriterThread

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnLastClose = Literal["keep", "remove"]

_JOIN_S = 30.0
_LEAVE_S = 4.0
_CLEAN_S = 2.0
_READ_S = 1.0
_SNAPSHOT_S, _SNAPSHOT_KEYS = 2e-3, 64  # how long a read goes on with one snapshot, looked at after so many keys
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def open_pool(root: Path | None, name: str, dram_bytes: int | None) -> Pool:
    """Join the pool, or make it; with ``dram_bytes`` None only join. OSError or ValueError with the reason in one line."""
    require_linux()
    end = time.monotonic() + _JOIN_S
    if dram_bytes is not None:
        warn_if_over_limit(name, dram_bytes)
    while True:
        try:
            directory = PoolDir(root, name, create=dram_bytes is not None)
        except FileNotFoundError as error:
            base = root or default_root()
            if dram_bytes is not None and base.is_dir() and time.monotonic() < end:
                continue  # its last user removed it between our making and our opening it
            raise FileNotFoundError(error.errno, f"there is no pool {name!r} in {base}") from None
        try:
            with directory.locked(_JOIN_S):
                return Pool(directory, prepare(directory, dram_bytes))
        except FileNotFoundError:
            directory.close()
            if dram_bytes is None or time.monotonic() >= end:
                raise
        except BaseException:
            directory.close()
            raise


def prepare(directory: PoolDir, dram_bytes: int | None) -> Geometry:
    """Make the files of a new pool, or check those of an old one; under the pool's lock."""
    meta = directory.read_meta()
    if meta is not None and meta["format"] != FORMAT:
        why = f"processes of another version of kvpool, which has pools of format {meta['format']}, this one of format {FORMAT}"
        _refuse_if_used(directory, f"{why}: stop them, or give each version a pool of its own")
        logger.warning("pool %s is of an older version of kvpool: emptied", directory.path)
        directory.wipe(keep_lock=True)
        meta = None
    if meta is not None and meta.get("boot") != boot_id():
        # Then the host did not restart, only the boot ids differ (containers may have own ones).
        why = f"processes with boot id {str(meta.get('boot'))!r}, this one has {boot_id()!r}"
        _refuse_if_used(directory, f"{why}: containers that share a pool must see the same /proc/sys/kernel/random/boot_id")
        logger.warning("pool %s is from before the last restart of this host: emptied", directory.path)
        directory.wipe(keep_lock=True)
        meta = None
    if meta is None:
        if dram_bytes is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no pool at {directory.path}")
        return _create(directory, dram_bytes)
    size, chunk = int(str(meta["dram_bytes"])), int(str(meta["chunk_bytes"]))
    if dram_bytes is not None and dram_bytes != size:
        raise ValueError(f"pool {directory.path} was made with dram_bytes={size}, this process asks for dram_bytes={dram_bytes}")
    return Geometry(chunk, size // chunk)


def _refuse_if_used(directory: PoolDir, by: str) -> None:
    """OSError when a process uses the pool."""
    try:
        fd = os.open("clients", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory.fd)
    except FileNotFoundError:
        return
    try:
        if clients.any_alive(fd):
            raise OSError(errno.EBUSY, f"pool {directory.path} is in use by {by}")
    finally:
        os.close(fd)


def _create(directory: PoolDir, dram_bytes: int) -> Geometry:
    geometry = geometry_for(dram_bytes)
    directory.wipe(keep_lock=True)
    for name in ("index", "clients"):
        os.close(directory.make_dir(name))
    for name, nbytes in (("arena", geometry.capacity), ("stamps", geometry.units * 8)):
        fd = directory.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)
    fd = directory.open_file("readers", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, TABLE_BYTES)
    finally:
        os.close(fd)
    directory.write_meta({"dram_bytes": dram_bytes, "chunk_bytes": geometry.chunk_bytes, "boot": boot_id()})
    return geometry


class Pool:
    """Everything that is open. Made under the pool's lock; ``close`` leaves the pool."""

    def __init__(self, directory: PoolDir, geometry: Geometry) -> None:
        self.directory = directory
        self.geometry = geometry
        self.pid = os.getpid()
        self.calls = 0  # that run now, and whether the last one has to close the pool; counted by the store
        self.left = False
        self.disk: DiskTier | None = None  # below this pool; set by the store, closed with it
        self._opened = ExitStack()
        self.writer: WriterThread
        try:
            self._open()
            self._start()
        except BaseException as error:
            _pools.discard(self)
            if not hasattr(self, "writer") or self.writer.close(_LEAVE_S):
                self._opened.close()
            else:
                self._let_go()
            if isinstance(error, lmdb.Error):
                raise OSError(errno.EIO, f"{directory.path}: the index cannot be opened ({error})") from None
            raise

    def _open(self) -> None:
        """What must be closed again, in the order in which it is closed last to first."""
        directory, geometry, opened = self.directory, self.geometry, self._opened
        self.fence: Fence = make_fence()
        self._clients = directory.make_dir("clients")
        opened.callback(os.close, self._clients)
        opened.callback(os.close, directory.make_dir("index"))  # open, so that no other index gets its inode number
        self.client, self._client_fd = clients.join(self._clients, geometry.units * 8)
        opened.callback(os.close, self._client_fd)
        opened.callback(clients.leave, self._clients, self.client, self._client_fd)
        self.leases = Leases(clients.open_array(self._clients, self.client), geometry)
        opened.callback(self.leases.close)
        self.peers = clients.Peers(self._clients, self.client)
        opened.callback(self.peers.close)
        self.arena = self._open_arena()
        opened.callback(self.arena.close)
        self.stamps = Stamps(directory.open_file("stamps"), geometry)
        opened.callback(self.stamps.close)
        self.ghosts = Ghosts(directory.open_file, geometry)
        opened.callback(self.ghosts.close)
        self.prefaulter = Prefaulter(self.arena)
        self.environment = index.acquire(directory.path / "index", index.map_size_for(geometry.units))
        opened.callback(index.release, self.environment)
        self.readers = Readers(directory.open_file("readers"), directory.open_file("readers"), self.fence)
        opened.callback(self.readers.close)
        lock = directory.open_file("index/data.mdb")
        self.write_lock = WriteLock(lock, self.environment.env, self.readers, self.fence)
        opened.callback(self.write_lock.close)

    def _open_arena(self) -> Arena:
        return Arena(self.directory.open_file("arena"), self.geometry)

    def _start(self) -> None:
        self.slabs = SlabTable(self.geometry)
        self.evictor = Evictor(self.stamps, self.peers, self.fence, self.ghosts)
        self.allocator = Allocator(
            self.geometry, self.arena, self.stamps, self.evictor, self.prefaulter.add_slab, lambda: self.leases.drops
        )
        self.writer = WriterThread(self.environment, self.write_lock, lambda txn: Records(txn, self.environment, self.slabs))
        _pools.add(self)
        self._clean()

    def _clean(self) -> None:
        """Take back what dead clients left. Under the pool's lock."""

        def step(records: Records) -> int:
            others = [client for client in self.peers.refresh() if client != self.client]
            if not others:
                records.set_counter(b"limit", 0)
            return self.evictor.sweep(records) + self.evictor.reclaim(records)

        try:
            self.writer.call(step, time.monotonic() + _CLEAN_S)
        except Overdue:
            logger.warning(
                "pool %s: a stopped process keeps the index; slots of dead ones are taken back later", self.directory.path
            )
        except Exception as error:  # noqa: BLE001 - the pool is as good as before
            logger.warning("pool %s: what dead processes left could not be taken back (%s)", self.directory.path, error)
        else:
            self.peers.bury()

    def read(self, function: Callable[[LmdbTransaction], T]) -> T:
        """Run ``function`` on a read transaction whose default table is ``objects``. Quick ones only: see Readers.read."""
        return self.readers.read(self.environment.env, function)

    def entries(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The raw index entry of each key (index.ENTRY), None where there is no object. Many keys, or a busy machine: not all from
        one snapshot."""
        found: list[bytes | None] = []

        def look(txn: LmdbTransaction) -> None:
            get, end = txn.get, time.monotonic() + _SNAPSHOT_S
            for start in range(len(found), len(keys), _SNAPSHOT_KEYS):
                found.extend([get(key) for key in keys[start : start + _SNAPSHOT_KEYS]])
                if time.monotonic() > end:
                    return

        try:
            while len(found) < len(keys):
                self.read(look)
        except lmdb.BadValsizeError:  # an empty or overlong key can name no object
            sound = [key for key in keys if 0 < len(key) <= index.MAX_KEY]
            those = dict(zip(sound, self.entries(sound), strict=True))
            return [those.get(key) for key in keys]
        return found

    def look(self, function: Callable[[Records], T], *, long: bool = False) -> T:
        """Run ``function`` on a snapshot of the index, with a slab table of its own; it must not write. ``long``: on a copy, so
        that no writer waits for it."""
        environment = self.environment
        if not environment.tables:
            return self.writer.call(function, time.monotonic() + _READ_S)
        if long:
            with index.copied(environment, self.read) as (copy, txn):
                return function(Records(txn, copy, SlabTable(self.geometry)))
        return self.read(lambda txn: function(Records(txn, environment, SlabTable(self.geometry))))

    def viewers(self) -> clients.Peers:
        """The clients that live now, for use outside the writer thread; the caller closes it."""
        peers = clients.Peers(self._clients, self.client)
        peers.refresh()
        return peers

    def close(self, on_last_close: OnLastClose) -> None:
        """Give back what is ours and leave."""
        if self.disk is not None and not self.disk.close():
            logger.warning("pool %s: stays open, for the disk is still moving bytes from or into its memory", self.directory.path)
            return
        self.writer.submit(self._give_back)
        stopped = self.writer.close(_LEAVE_S)
        self.prefaulter.close()
        try:
            with self.directory.locked(_LEAVE_S):
                last = stopped and not self.peers.removed() and self.peers.refresh() == [self.client]
                clients.leave(self._clients, self.client, self._client_fd)
                if last and on_last_close == "remove":
                    self.directory.remove()
        except OSError as error:
            logger.warning("pool %s: left without clearing up (%s)", self.directory.path, error)
        self._close_files(stopped)

    def _give_back(self, records: Records) -> None:
        mine = [(unit, reserved) for unit, reserved in records.reservations() if reserved.owner == self.client]
        for unit, reserved in mine:
            records.cancel(unit, reserved)

    def _close_files(self, stopped: bool) -> None:
        _pools.discard(self)
        if stopped:
            self._opened.close()
            self.directory.close()
        else:  # the writer thread may go on one day: only the lock is let go
            logger.warning("pool %s: the index stays open, a stopped process keeps its lock", self.directory.path)
            self._let_go()

    def _let_go(self) -> None:
        fd, self._client_fd = (
            self._client_fd,
            -1,
        )  # a child of a forked child comes here again: by then the number is another file's
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
        self.readers.leave()

    def after_fork(self) -> None:
        """In a forked child: let go of the locks, or the child would keep a dead parent alive."""
        self._let_go()
        self.write_lock.close()


def _after_fork_in_child() -> None:
    for pool in list(_pools):
        pool.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
__all__ = ["OnLastClose", "Pool", "open_pool"]
