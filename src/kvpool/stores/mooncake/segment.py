"""Make the own segment fast from its first put: its pages are mapped before they are needed, in the background.

The library maps its memory lazily, and a first touch costs ten times a copy. Where the segment lies is told by an object in it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvpool.stores.mooncake.client import Client

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SLICE = 16 << 20
_PAGE = 4096


def address_in(client: Client, name: str, value: bytes) -> int:
    """Where an object with this value lies in this process; 0 where it lies elsewhere.

    The library does not tell whose memory an address is in; the same address may mean something else here, so the bytes decide."""
    for replica in client.batch_get_replica_desc([name]).get(name, []):
        if replica.is_memory_replica():
            address = int(replica.get_memory_descriptor().buffer_descriptor.buffer_address)
            if _bytes_at(address, len(value)) == value:
                return address
    return 0


def _bytes_at(address: int, nbytes: int) -> bytes:
    """Empty where nothing is mapped."""
    with suppress(OSError, ValueError), open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(nbytes) or b""
    return b""


def mapping_around(address: int, nbytes: int) -> range:
    """The part of the mapping that holds ``address`` within ``nbytes`` of it; empty where there is none.

    The kernel shows neighbouring mappings as one, so that more than the segment may lie in it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if start <= address < end:
                first = max(start, address // _PAGE * _PAGE - (nbytes if end - address < nbytes else 0))
                return range(first, min(end, address // _PAGE * _PAGE + nbytes))
    return range(0)


def populate(memory: range, wait: Callable[[float], bool]) -> int:
    """Map these pages at the lowest priority; how many bytes were. Ends when ``wait(0)`` is True, or where this kernel cannot."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for start in range(memory.start, memory.stop, _SLICE):
        nbytes = min(_SLICE, memory.stop - start)
        if wait(0):
            break
        if madvise(start, nbytes, _MADV_POPULATE_WRITE) != 0:
            logger.info("kvpool: the pool's memory is not mapped ahead: %s", os.strerror(ctypes.get_errno()))
            break
        done += nbytes
    return done
