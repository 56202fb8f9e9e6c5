"""What writers and readers of pieces need of their store, and which keys they have open.

The library knows one write and one read session per key and client: two writers of one key are kept apart here, and a read session
ends with the last of its readers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.stores.base import Answer, Batch, Result
from kvpool.stores.mooncake.client import Client
from kvpool.stores.native import NativeCalls


class Books:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: set[bytes] = set()
        self._reading: Counter[bytes] = Counter()

    def claim(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that nobody in this process writes; they are the caller's now."""
        with self._lock:
            free = set(keys) - self._writing
            self._writing |= free
            return free

    def give_up(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._writing -= set(keys)

    def writing(self) -> list[bytes]:
        with self._lock:
            return sorted(self._writing)

    def read(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._reading.update(keys)

    def unread(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have no reader any more."""
        with self._lock:
            self._reading.subtract(keys)
            ended = [key for key in keys if self._reading[key] <= 0]
            for key in ended:
                del self._reading[key]
            return ended


@dataclass(slots=True)
class Link:
    """One opening of a store. ``look``, ``fetch`` (until a time) and ``quarantine`` run on native threads. ``trailer``: objects end
    with a checksum. ``host``: the library takes any memory of this process."""

    client: Client
    calls: NativeCalls
    config: object
    trailer: bool
    host: bool
    fault: Callable[[BaseException], Result]
    look: Callable[[Sequence[bytes]], list[Answer]]
    fetch: Callable[[Batch, float], list[Result]]
    quarantine: Callable[[Sequence[bytes]], None]
    books: Books = field(default_factory=Books)
