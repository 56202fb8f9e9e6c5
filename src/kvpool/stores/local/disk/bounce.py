"""Memory for objects that are read while the pool has no slot for them. Bounded, whatever asks for it at once."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time


class Bounce:
    """``limit`` bytes at most are out at one time. Buffers are aligned to pages."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._out: dict[int, tuple[mmap.mmap, int]] = {}
        self._used = 0
        self._change = threading.Condition()

    def take(self, nbytes: int) -> int | None:
        """The address of a buffer, None when there is no room now."""
        with self._change:
            if self._used + nbytes > self.limit:
                return None
            try:
                memory = mmap.mmap(-1, nbytes)
            except OSError:
                return None
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
            self._out[address] = memory, nbytes
            self._used += nbytes
            self.peak = max(self.peak, self._used)
            return address

    def give(self, address: int) -> None:
        with self._change:
            _, nbytes = self._out.pop(address)  # unmapped when nobody has a view of it any more
            self._used -= nbytes
            self._change.notify_all()

    def wait(self, nbytes: int, deadline: float) -> bool:
        """Until there is room for ``nbytes``; False at the deadline, or when there never will be."""
        if nbytes > self.limit:
            return False
        with self._change:
            return self._change.wait_for(lambda: self._used + nbytes <= self.limit, max(0.0, deadline - time.monotonic()))
