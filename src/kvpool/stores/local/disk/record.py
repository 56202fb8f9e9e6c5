"""What the disk itself says about an object: one record of 512 bytes per slot, in the file ``records`` at the slot's unit.

A sector is written whole or its checksum fails, so a record is either valid or nothing. It names key, place, length and the
checksum of the bytes, so that every read can tell whether it got what was asked for."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

RECORD_BYTES = 512
MAGIC = 0x3152_6C6F_6F70_766B  # "kvpoolR1"
BLANK = bytes(RECORD_BYTES)
_FIELDS = struct.Struct("<QQQQQQIIQqH255s")
_SUM = struct.Struct("<Q")
_BODY = RECORD_BYTES - _SUM.size
_SCAN_BYTES = 16 << 20
_TABLE = np.dtype({"names": ["magic"], "formats": ["<u8"], "offsets": [0], "itemsize": RECORD_BYTES})


class Record(NamedTuple):
    """``identity`` is that of the files, ``chunk`` and ``chunks`` are where the slab lies, ``last_use`` is time.time_ns()."""

    identity: int
    generation: int
    unit: int
    nbytes: int
    slot_bytes: int
    chunk: int
    chunks: int
    data_sum: int
    last_use: int
    key: bytes


class Scan(NamedTuple):
    """``torn`` records failed their checksum or lay in the wrong place, ``foreign`` ones are of other files."""

    records: list[Record]
    torn: int
    foreign: int


def pack(record: Record) -> bytes:
    """ValueError for a key that does not fit."""
    if not 0 < len(record.key) <= 255:
        raise ValueError(f"a key of {len(record.key)} bytes")
    body = _FIELDS.pack(MAGIC, *record[:9], len(record.key), record.key).ljust(_BODY, b"\0")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack(raw: bytes | memoryview) -> Record | None:
    """None for anything but a whole record."""
    if len(raw) != RECORD_BYTES or _SUM.unpack_from(raw, _BODY)[0] != xxhash.xxh3_64_intdigest(raw[:_BODY]):
        return None
    magic, *numbers, length, key = _FIELDS.unpack_from(raw)
    if magic != MAGIC or not 0 < length <= 255:
        return None
    return Record._make((*numbers, key[:length]))


def scan(fd: int, identity: int, units: int) -> Scan:
    """Every valid record of the file, in order of place. Holes are skipped; OSError when the file cannot be read."""
    records: list[Record] = []
    torn = foreign = 0
    for first, raw in _pieces(fd, units * RECORD_BYTES):
        magic: NDArray[np.uint64] = np.frombuffer(raw, dtype=_TABLE)["magic"]
        view = memoryview(raw)
        for place in np.flatnonzero(magic).tolist():
            record = unpack(view[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
            if record is None:
                torn += 1
            elif record.identity != identity:
                foreign += 1
            elif record.unit != first + place:
                torn += 1
            else:
                records.append(record)
    return Scan(records, torn, foreign)


def _pieces(fd: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The parts of the file that hold data, in whole records: number of the first record, and bytes."""
    end = min(end, os.fstat(fd).st_size) // RECORD_BYTES * RECORD_BYTES
    start = 0
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA) // RECORD_BYTES * RECORD_BYTES
        except OSError:  # ENXIO: nothing but a hole is left
            return
        stop = min(end, os.lseek(fd, start, os.SEEK_HOLE))
        stop = min(end, -(-stop // RECORD_BYTES) * RECORD_BYTES)
        while start < stop:
            raw = os.pread(fd, min(_SCAN_BYTES, stop - start), start)
            raw = raw[: len(raw) // RECORD_BYTES * RECORD_BYTES]
            if not raw:
                return
            yield start // RECORD_BYTES, raw
            start += len(raw)
