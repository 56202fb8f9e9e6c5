"""Memory for objects that are read while the pool has no slot for them. Bounded, whatever asks for it at once.

Buffers that come back are kept for a while: fresh memory costs a page fault for every 4 KiB."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

KEEP_S = 5.0


class Bounce:
    """``limit`` bytes at most are out at one time. Buffers are aligned to pages."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._out: dict[int, tuple[mmap.mmap, int]] = {}
        self._used = 0
        self._kept: list[tuple[float, int, mmap.mmap, int]] = []  # when it came back, address, memory, bytes
        self._change = threading.Condition()

    def take(self, nbytes: int) -> int | None:
        """The address of a buffer, None when there is no room now."""
        with self._change:
            if self._used + nbytes > self.limit:
                return None
            found = self._take_kept(nbytes)
            if found is None:
                return None
            address, memory = found
            self._out[address] = memory, nbytes
            self._used += nbytes
            self._let_go()
            self.peak = max(self.peak, self._used)
            return address

    def _take_kept(self, nbytes: int) -> tuple[int, mmap.mmap] | None:
        """A buffer of just this size that came back, else a fresh one; None where the system gives none."""
        for place in range(len(self._kept) - 1, -1, -1):
            _, address, memory, size = self._kept[place]
            if size == nbytes:
                del self._kept[place]
                return address, memory
        try:
            fresh = mmap.mmap(-1, nbytes)
        except OSError:
            return None
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(fresh)), fresh

    def give(self, address: int) -> None:
        with self._change:
            memory, nbytes = self._out.pop(address)
            self._used -= nbytes
            self._kept.append((time.monotonic(), address, memory, nbytes))
            self._let_go()
            self._change.notify_all()

    def tidy(self) -> None:
        """Unmap what nobody has asked for lately."""
        with self._change:
            self._let_go()

    def _let_go(self) -> None:
        old = time.monotonic() - KEEP_S
        room = self.limit - self._used
        while self._kept and (self._kept[0][0] < old or sum(size for *_, size in self._kept) > room):
            del self._kept[0]

    def wait(self, nbytes: int, deadline: float) -> bool:
        """Until there is room for ``nbytes``; False at the deadline, or when there never will be."""
        if nbytes > self.limit:
            return False
        with self._change:
            return self._change.wait_for(lambda: self._used + nbytes <= self.limit, max(0.0, deadline - time.monotonic()))
