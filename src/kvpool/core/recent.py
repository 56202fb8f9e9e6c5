"""A bounded set of recently seen names that forgets by age and by number: the negative cache."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable


class RecentSet:
    """At most ``capacity`` entries, each for ``ttl_s`` seconds; the oldest go first. Not thread-safe."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._ttl = ttl_s
        self._clock = clock
        self._until: OrderedDict[Hashable, float] = OrderedDict()

    def add(self, names: Iterable[Hashable]) -> None:
        until = self._clock() + self._ttl
        for name in names:
            self._until.pop(name, None)
            self._until[name] = until
        while len(self._until) > self._capacity:
            self._until.popitem(last=False)

    def discard(self, names: Iterable[Hashable]) -> None:
        for name in names:
            self._until.pop(name, None)

    def clear(self) -> None:
        self._until.clear()

    def __contains__(self, name: Hashable) -> bool:
        until = self._until.get(name)
        if until is None:
            return False
        if until <= self._clock():
            del self._until[name]
            return False
        return True

    def __len__(self) -> int:
        return len(self._until)
