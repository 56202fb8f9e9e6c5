"""Whether the disk may be used now. One process that sees it fail switches it off for all of the pool, for a while."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.pool_dir import PoolDir

logger = logging.getLogger(__name__)

Work = Literal["read", "write"]
FAILURES = 5
COOLDOWN_S = 30.0


class Switch:
    """Shared through the file ``switch``: one int64, the CLOCK_MONOTONIC time in ns until which the disk is off. After that time
    the next call is the probe: one more failure, and it is off again; one success, and all is well."""

    def __init__(self, directory: PoolDir) -> None:
        fd = directory.open_file("switch", os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._until: NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)
        self._lock = threading.Lock()
        self._failures = dict.fromkeys(get_args(Work), 0)  # in a row
        self._told = False
        self._closed = False

    @property
    def on(self) -> bool:
        return not self._closed and int(self._until[0]) <= time.monotonic_ns()

    def worked(self, work: Work) -> None:
        if not self._failures[work]:
            return
        with self._lock:
            self._failures[work] = 0
            if self._told:
                logger.warning("the disk tier works again")
                self._told = False

    def failed(self, work: Work, error: object) -> None:
        with self._lock:
            self._failures[work] += 1
            if self._failures[work] >= FAILURES:
                self._failures[work] = FAILURES - 1
                self._off(error)

    def hangs(self, seconds: float) -> None:
        """Off at once, whatever came before."""
        with self._lock:
            self._failures = dict.fromkeys(self._failures, FAILURES - 1)
            self._off(f"no answer for {seconds:.0f} s")

    def _off(self, reason: object) -> None:
        if self._closed:
            return
        self._until[0] = time.monotonic_ns() + int(COOLDOWN_S * 1e9)
        if not self._told:
            self._told = True
            text = "the disk tier is switched off (%s); memory goes on, the disk is tried again every %g s"
            logger.warning(text, reason, COOLDOWN_S)

    def close(self) -> None:
        self._closed = True
        self._until = np.zeros(1, dtype=np.int64)
        try:
            self._map.close()
        except BufferError:
            logger.debug("the switch of the disk tier stays mapped")
