"""Puts and gets of host memory: the client process makes or finds the objects, this process copies the bytes, once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvpool.stores.base import Addresses, Batch, Result, Status, Tier
from kvpool.stores.opaque import take
from kvpool.stores.yuanrong.child import Child, flat, offsets_of
from kvpool.stores.yuanrong.codes import LibraryError, result_of
from kvpool.stores.yuanrong.keys import names_of
from kvpool.stores.yuanrong.link import Link
from kvpool.stores.yuanrong.messages import Buffer

MISSING = Result(Status.MISSING)


class HostTransfers:
    """Thread-safe. ``call_s``: how long one call of the library may take; ``wait_ms``: how long a get waits for objects to come."""

    def __init__(self, link: Link, call_s: float, wait_ms: int) -> None:
        self.link = link
        self._call_s = call_s
        self._wait_ms = wait_ms

    def put(self, batch: Batch) -> list[Result]:
        """All or none of the objects; half by half, while there is time, where all together find no room."""
        return self._put(batch, time.monotonic() + self._call_s)

    def _put(self, batch: Batch, until: float) -> list[Result]:
        try:
            buffers, child = self.create(batch.keys, batch.object_nbytes, self._call_s)
        except LibraryError as error:
            refused = result_of(str(error))
            if refused.status is not Status.NO_SPACE or len(batch.keys) == 1 or time.monotonic() > until:
                return [refused] * len(batch.keys)
            rows, half = range(len(batch.keys)), len(batch.keys) // 2
            return self._put(take(batch, rows[:half]), until) + self._put(take(batch, rows[half:]), until)
        try:
            write_into(child, buffers, 0, batch.addresses, batch.sizes)
            self.publish(buffers, child, self._call_s)
        except BaseException:
            child.drop([buffer.number for buffer in buffers])
            raise
        return [Result(Status.OK, batch.object_nbytes, tier=Tier.REMOTE)] * len(batch.keys)

    def get(self, batch: Batch) -> list[Result]:
        buffers, child = self.open(batch.keys, self._call_s + self._wait_ms / 1000)
        good = [row for row, buffer in enumerate(buffers) if buffer is not None and buffer.nbytes == batch.object_nbytes]
        results = [MISSING] * len(batch.keys)
        try:
            if good:
                chosen = [buffer for row in good if (buffer := buffers[row]) is not None]
                read_from(child, chosen, 0, batch.addresses[np.array(good, dtype=np.int64)], batch.sizes)
        finally:
            child.drop([buffer.number for buffer in buffers if buffer is not None])
        for row in good:
            results[row] = Result(Status.OK, batch.object_nbytes, tier=Tier.REMOTE)
        return results

    def create(self, keys: Sequence[bytes], nbytes: int, within_s: float) -> tuple[list[Buffer], Child]:
        """Memory for objects that nobody sees yet."""
        reply, child = self.link.ask("create", within_s, names=names_of(keys), nbytes=nbytes)
        buffers = [buffer for buffer in reply.buffers if buffer is not None]
        if len(buffers) != len(keys) or any(buffer.nbytes != nbytes for buffer in buffers):
            child.drop([buffer.number for buffer in buffers])
            raise OSError(f"the library made {len(buffers)} objects instead of {len(keys)} of {nbytes} bytes")
        return buffers, child

    def publish(self, buffers: Sequence[Buffer], child: Child, within_s: float) -> None:
        """By the process that made them: numbers mean nothing to another one."""
        child.ask("publish", time.monotonic() + within_s, buffers=[buffer.number for buffer in buffers])

    def open(self, keys: Sequence[bytes], within_s: float) -> tuple[list[Buffer | None], Child]:
        """Memory of the objects that are there, to be dropped by number."""
        reply, child = self.link.ask("open", within_s, names=names_of(keys), wait_ms=self._wait_ms)
        if len(reply.buffers) != len(keys):
            child.drop([buffer.number for buffer in reply.buffers if buffer is not None])
            raise OSError(f"the library answered for {len(reply.buffers)} of {len(keys)} keys")
        return reply.buffers, child

    def close(self) -> None:
        self.link.close()


def write_into(child: Child, buffers: Sequence[Buffer], offset: int, addresses: Addresses, sizes: Addresses) -> None:
    """Segments of row i into object i from ``offset`` on."""
    child.write(*_runs(buffers, offset, addresses, sizes))


def read_from(child: Child, buffers: Sequence[Buffer], offset: int, addresses: Addresses, sizes: Addresses) -> None:
    """Bytes of object i from ``offset`` on into the segments of row i."""
    child.read(*_runs(buffers, offset, addresses, sizes))


def _runs(buffers: Sequence[Buffer], offset: int, addresses: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    starts = np.array([buffer.address for buffer in buffers], dtype=np.int64)
    return flat(starts, offsets_of(sizes, offset)), addresses.ravel(), np.tile(sizes, len(buffers))
