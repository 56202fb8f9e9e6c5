"""How much one put may store."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

from kvpool.stores.memcache.metrics import MetaHttp

LARGEST_SHARE = 0.55
"""Of the pool for one put. The rest of a larger batch is not stored, since it would push out its own beginning: the
library, which evicts in the background, often goes below its low mark."""
KNOWN_FOR_S = 10.0


class Room:
    """The pool's size as it was some seconds ago; without ``http`` nothing is known, and nothing limited."""

    def __init__(self, http: MetaHttp | None) -> None:
        self._http = http
        self._lock = threading.Lock()
        self._bytes = 0
        self._asked = float("-inf")

    def objects(self, nbytes: int) -> int:
        """How many objects of this length one put may store."""
        with self._lock:
            if self._http is not None and time.monotonic() - self._asked > KNOWN_FOR_S:
                self._asked = time.monotonic()
                with suppress(OSError):
                    self._bytes = self._http.usage().capacity
            return int(self._bytes * LARGEST_SHARE) // nbytes if self._bytes else sys.maxsize
