"""Reading and writing the files of the disk tier. Blocking: called by I/O threads only, except when the tier opens.

The arena is read and written past the page cache (O_DIRECT), straight from and into memory that is aligned to pages; where a
filesystem cannot do that, through the cache. Records go through the cache: they are small, and a sector is written whole."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading

import xxhash

from kvpool.stores.local.disk.folder import DiskFolder
from kvpool.stores.local.disk.record import BLANK, RECORD_BYTES, Record, pack, unpack
from kvpool.stores.local.geometry import Geometry, slot_bytes_for

logger = logging.getLogger(__name__)

_PUNCH = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory as bytes; the caller keeps it mapped."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def checksum(address: int, nbytes: int) -> int:
    return int(xxhash.xxh3_64_intdigest(view_of(address, nbytes)))


class Damaged(Exception):
    """What was read is not what was written: wrong bytes, or a record of something else."""


class DiskFiles:
    """``arena`` is the descriptor to allocate by. Lengths are rounded up to whole granules, as slots are."""

    def __init__(self, folder: DiskFolder, geometry: Geometry, identity: int) -> None:
        self.folder = folder
        self.geometry = geometry
        self.identity = identity
        self.arena = folder.open_file("arena", os.O_RDWR | os.O_CREAT)
        self.records = folder.open_file("records", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.arena, geometry.capacity)
        os.ftruncate(self.records, geometry.units * RECORD_BYTES)
        self._lock = threading.Lock()
        self._direct = self.arena
        self._open_direct()

    def _open_direct(self) -> None:
        """Test it with a read too: some filesystems accept the flag and refuse the calls."""
        try:
            fd = self.folder.open_file("arena", os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            self._through_cache(error)
            return
        self._direct = fd
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(fd, [page], 0)
        except OSError as error:
            self._through_cache(error)

    def _through_cache(self, error: OSError) -> None:
        """Go on without O_DIRECT; raises ``error`` when that is not what it is about."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        with self._lock:
            if self._direct != self.arena:
                os.close(self._direct)
                self._direct = self.arena
            logger.info("%s: no O_DIRECT on this filesystem, the disk tier uses the page cache", self.folder.path)

    @property
    def direct(self) -> bool:
        return self._direct != self.arena

    # objects

    def read(self, place: Record, offset: int, address: int) -> None:
        """Read the object that ``place`` describes (key, unit, generation, nbytes count) into memory, and verify it.

        Damaged when it is not that object, OSError when the disk fails."""
        record = unpack(self.read_record(place.unit))
        wanted = (self.identity, place.key, place.generation, place.nbytes)
        if record is None or (record.identity, record.key, record.generation, record.nbytes) != wanted:
            raise Damaged("its record is not there, or of another object")
        self.read_data(offset, address, slot_bytes_for(place.nbytes))
        if checksum(address, place.nbytes) != record.data_sum:
            raise Damaged("its bytes do not have their checksum")

    def write(self, place: Record, offset: int, address: int) -> None:
        """Write an object, then its record. Whatever stood there before is gone first, so a crash leaves one or nothing."""
        self.clear_record(place.unit)
        summed = place._replace(identity=self.identity, data_sum=checksum(address, place.nbytes))
        self.write_data(offset, address, slot_bytes_for(place.nbytes))
        self.write_record(place.unit, pack(summed))

    # bytes

    def read_data(self, offset: int, address: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            count = os.preadv(self._direct, [view_of(address + done, nbytes - done)], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"{self.folder.path}/arena ends at {offset + done}")
            done += count

    def write_data(self, offset: int, address: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            done += os.pwritev(self._direct, [view_of(address + done, nbytes - done)], offset + done)

    def read_record(self, unit: int) -> bytes:
        return os.pread(self.records, RECORD_BYTES, unit * RECORD_BYTES)

    def write_record(self, unit: int, raw: bytes) -> None:
        if os.pwrite(self.records, raw, unit * RECORD_BYTES) != len(raw):
            raise OSError(errno.EIO, f"{self.folder.path}/records: a record was not written whole")

    def clear_record(self, unit: int) -> None:
        self.write_record(unit, BLANK)

    def blank(self, first: int, count: int) -> None:
        """Clear the records of many units at once."""
        start, nbytes = ctypes.c_int64(first * RECORD_BYTES), ctypes.c_int64(count * RECORD_BYTES)
        if ctypes.CDLL(None, use_errno=True).fallocate(self.records, _PUNCH, start, nbytes) == 0:
            return
        step = 4096
        for unit in range(first, first + count, step):
            self.write_record(unit, BLANK * min(step, first + count - unit))

    def close(self) -> None:
        for fd in {self.arena, self.records, self._direct}:
            os.close(fd)
