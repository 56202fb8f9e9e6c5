"""A bounded set of recently seen names that forgets by age and by number: the negative cache."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable


class RecentSet:
    """At most ``capacity`` entries, each for ``ttl_s`` seconds; the oldest go first. Thread-safe."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._ttl = ttl_s
        self._clock = clock
        self._until: OrderedDict[Hashable, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, names: Iterable[Hashable]) -> None:
        until = self._clock() + self._ttl
        with self._lock:
            for name in names:
                self._until.pop(name, None)
                self._until[name] = until
            while len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def discard(self, names: Iterable[Hashable]) -> None:
        with self._lock:
            for name in names:
                self._until.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def __contains__(self, name: Hashable) -> bool:
        with self._lock:
            until = self._until.get(name)
            if until is not None and until <= self._clock():
                del self._until[name]
                return False
            return until is not None

    def __len__(self) -> int:
        return len(self._until)
