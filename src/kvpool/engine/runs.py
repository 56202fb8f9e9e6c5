"""A job on its way through a worker's threads: it is concluded once, and its blocks are free once no call can touch them."""

from __future__ import annotations

import threading
import time

from kvpool.core.jobs import LoadJob, SaveJob

GRACE_S = 0.25  # beyond the job's own deadline, which its calls keep by themselves


class JobRun:
    """``begin`` -> work -> ``conclude``, or ``give_up`` from another thread once it is overdue. Thread-safe."""

    def __init__(self, job: LoadJob | SaveJob) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._begun_at: float | None = None
        self._concluded = False

    def begin(self) -> bool:
        """Called by the thread that takes the job; False when it has been given up meanwhile."""
        with self._lock:
            if not self._concluded:
                self._begun_at = time.monotonic()
            return not self._concluded

    def conclude(self) -> bool:
        """True for the one who may report how the job ended."""
        with self._lock:
            first, self._concluded = not self._concluded, True
            return first

    def overdue(self, stuck_for: float) -> bool:
        """Past its deadline, which runs from when a thread took it; or waiting for threads that are all stuck for as long."""
        with self._lock:
            spent = time.monotonic() - self._begun_at if self._begun_at is not None else stuck_for
        return spent > self.job.deadline_s + GRACE_S

    @property
    def begun(self) -> bool:
        """Whether a thread has taken the job, so that its call may touch the blocks until it returns."""
        with self._lock:
            return self._begun_at is not None
