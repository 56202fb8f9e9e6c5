"""KVClient: objects in shared memory of the worker. Runs in the client process.

An object is made in three steps: ``create`` gives memory that nobody else sees, somebody fills it, ``publish`` gives it its key.
What is not published disappears with the process. Publishing under a key that is there replaces the object as a whole; who still
holds the old one goes on reading the old bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from kvpool.stores.yuanrong.codes import NOT_FOUND, code_of
from kvpool.stores.yuanrong.library import Native, connect_arguments
from kvpool.stores.yuanrong.messages import Buffer, Settings


class KvClient:
    """Not thread-safe. Every call may raise RuntimeError with the library's text."""

    def __init__(self, module: Native, settings: Settings) -> None:
        kind = module.KVClient
        arguments = connect_arguments(kind, settings.connect_ms, settings.request_ms, settings.exclusive)
        self._client = kind(settings.host, settings.port, **arguments)
        self._client.init()
        self._mode = module.WriteMode.NONE_L2_CACHE_EVICT
        self._numbers = count(1)
        self._held: dict[int, tuple[Native, Native]] = {}  # the library's buffer, and the view of it whose address was told

    def exists(self, names: Sequence[str]) -> list[bool]:
        return found_of(self._client, names)

    def create(self, names: Sequence[str], nbytes: int) -> list[Buffer | None]:
        """Memory for new objects, all of ``nbytes``: for each or, by RuntimeError, for none."""
        made = self._client.mcreate(list(names), [nbytes] * len(names), self._mode)
        return [self._hold(buffer, buffer.MutableData()) for buffer in made]

    def publish(self, buffers: Sequence[int]) -> None:
        """Give created objects their keys, and let go of them."""
        chosen = [self._held[number][0] for number in buffers]
        self._client.mset_buffer(chosen)
        self.drop(buffers)

    def open(self, names: Sequence[str], wait_ms: int) -> list[Buffer | None]:
        """Memory of objects that are there; it stays as it is until it is dropped, whatever becomes of the object."""
        try:
            got = self._client.get_read_only_buffers(list(names), wait_ms)
        except RuntimeError as error:
            if code_of(str(error)) != NOT_FOUND:
                raise
            return [None] * len(names)
        return [None if buffer is None else self._hold(buffer, buffer.immutable_data()) for buffer in got]

    def drop(self, buffers: Sequence[int]) -> None:
        for number in buffers:
            self._held.pop(number, None)

    def delete(self, names: Sequence[str]) -> list[str]:
        """Names that could not be deleted."""
        return list(self._client.delete(list(names)))

    def close(self) -> None:
        self._held.clear()
        del self._client

    def _hold(self, buffer: Native, view: Native) -> Buffer:
        number, memory = next(self._numbers), np.frombuffer(view, dtype=np.uint8)
        self._held[number] = (buffer, memory)
        return Buffer(number, memory.ctypes.data, memory.nbytes)


def found_of(client: Native, names: Sequence[str]) -> list[bool]:
    """``exist`` of either client; it raises where no key at all is there, in some versions."""
    try:
        return [bool(found) for found in client.exist(list(names))]
    except RuntimeError as error:
        if code_of(str(error)) != NOT_FOUND:
            raise
        return [False] * len(names)
