"""Ghosts: which keys were evicted lately. One small table, shared by all processes of a pool, tells a miss of something evicted
from a miss of something never stored.

A key is remembered as a 64-bit tag in one of ``sets`` sets of ``WAYS`` tags, newest first; the oldest of a set falls out. Two keys
are confused when their tags are equal: for a key never evicted the chance is below ``WAYS`` / 2**64, so under one in 10**18.

Written inside the index's write transactions only, by one process at a time; read without any lock: a tag is eight aligned bytes,
and a reader that meets a set while it is shifted sees, at worst, a plain miss. Nothing but a count depends on it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from hashlib import blake2b

from kvpool.stores.local.geometry import Geometry

logger = logging.getLogger(__name__)

WAYS = 8
_LEAST, _MOST = 1 << 10, 1 << 17  # entries: 8 KiB to 1 MiB


def ghost_entries(geometry: Geometry) -> int:
    """How many evicted keys a pool remembers: a power of two, about four for every slot of the smallest class, within limits."""
    return min(_MOST, max(_LEAST, 1 << (geometry.units * 4 - 1).bit_length()))


class Ghosts:
    """The table of one pool. ``open_file`` opens or creates its file; called under the pool's lock.

    Where the file can get no memory the pool works without: nothing is remembered, every miss is a plain one.
    """

    def __init__(self, open_file: Callable[[str, int], int], geometry: Geometry) -> None:
        self._sets = ghost_entries(geometry) // WAYS
        self._tags: memoryview | None = None
        self._map: mmap.mmap | None = None
        nbytes = self._sets * WAYS * 8
        try:
            fd = open_file("ghosts", os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, nbytes)  # a page without memory would be a SIGBUS
                self._map = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            logger.warning("evicted keys cannot be remembered: no memory for that (%s)", error)
            return
        self._tags = memoryview(self._map).cast("Q")

    def add(self, key: bytes) -> None:
        """The key is being evicted. Only inside a write transaction."""
        tags = self._tags
        if tags is None:
            return
        tag, first = self._place(key)
        known = tags[first : first + WAYS].tolist()
        at = known.index(tag) if tag in known else WAYS - 1
        for way in range(at, 0, -1):
            tags[first + way] = known[way - 1]
        tags[first] = tag

    def discard(self, key: bytes) -> None:
        """The key is stored again, or removed on purpose: no ghost any more. Only inside a write transaction."""
        tags = self._tags
        if tags is None:
            return
        tag, first = self._place(key)
        known = tags[first : first + WAYS].tolist()
        if tag in known:
            rest = [other for other in known if other != tag]
            for way, other in enumerate([*rest, *[0] * (WAYS - len(rest))]):
                tags[first + way] = other

    def __contains__(self, key: bytes) -> bool:
        tags = self._tags
        if tags is None:
            return False
        tag, first = self._place(key)
        return tag in tags[first : first + WAYS].tolist()

    def _place(self, key: bytes) -> tuple[int, int]:
        """The tag, never 0, and where its set begins."""
        digest = blake2b(key, digest_size=16).digest()
        return int.from_bytes(digest[:8], "little") or 1, int.from_bytes(digest[8:], "little") % self._sets * WAYS

    def close(self) -> None:
        tags, self._tags = self._tags, None
        if tags is not None:
            with contextlib.suppress(BufferError):  # a reader in another thread still looks: it unmaps with its view
                tags.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()


__all__ = ["Ghosts", "ghost_entries"]
