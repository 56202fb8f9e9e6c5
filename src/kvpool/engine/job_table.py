"""The scheduler's open jobs: their pins, their leases, and what the ranks have said of them so far."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from kvpool.core.jobs import Job, JobReport, SaveJob
from kvpool.engine.lookup import LookupService
from kvpool.engine.pins import BlockPins
from kvpool.engine.threads import Ticket
from kvpool.stores.base import Lease

HEARD_S = 2.0  # a job that is past its deadline ends in the worker, and the engine hears of that a step later
FREES_SOON_S = 1.0  # how young a save must be for its blocks to be worth waiting for


@dataclass
class OpenJob:
    """A job that some rank has not ended yet."""

    job: Job
    report: JobReport
    lease: Lease | None
    started: float
    renewal: Ticket[Lease] | None = None


class JobTable:
    """``open`` -> ``merge`` until every rank has ended the job -> closed: unpinned, its lease released. Or ``cancel``, unsent."""

    def __init__(self, service: LookupService, pins: BlockPins, world_size: int) -> None:
        self._service = service
        self._pins = pins
        self._world_size = world_size
        self._jobs: dict[int, OpenJob] = {}
        self._ids = itertools.count(1)
        self._ended = 0.0  # when a rank last ended a job

    def next_id(self) -> int:
        return next(self._ids)

    def open(self, job: Job, lease: Lease | None) -> None:
        self._pins.pin(job.job_id, job.block_ids, saving=isinstance(job, SaveJob))
        self._jobs[job.job_id] = OpenJob(job, JobReport(), lease, time.monotonic())

    def merge(self, job_id: int, ended: JobReport) -> tuple[Job, JobReport | None] | None:
        """The job, and its whole report if this was the last rank. None for an id that is not open."""
        opened = self._jobs.get(job_id)
        if opened is None:
            return None
        opened.report.merge(ended)
        self._ended = time.monotonic()
        if opened.report.ranks < self._world_size:
            return opened.job, None
        self._close(job_id)
        return opened.job, opened.report

    def cancel(self, job_id: int) -> None:
        """A save that was never sent."""
        self._close(job_id)

    def _close(self, job_id: int) -> None:
        opened = self._jobs.pop(job_id)
        self._pins.unpin(job_id)
        self._end_lease(opened)

    def _end_lease(self, opened: OpenJob) -> None:
        if opened.renewal is not None:
            opened.renewal.then(lambda ticket: self._service.release(ticket.value))
        else:
            self._service.release(opened.lease)

    def renew_leases(self) -> None:
        """Loads that wait long for a thread keep what they are going to read."""
        for opened in self._jobs.values():
            if opened.renewal is not None and opened.renewal.done():
                opened.lease, opened.renewal = opened.renewal.value or opened.lease, None
            if opened.renewal is None and opened.lease is not None and opened.lease.half_over():
                opened.renewal = self._service.renew(opened.lease)

    def busy(self) -> bool:
        """Whether the engine keeps stepping to hear of open jobs. Each has its time from when it was opened, or, since it may have
        waited for a thread, from when one before it ended; a call that never ends must not keep an idle engine busy."""
        now = time.monotonic()
        return any(now - max(o.started, self._ended) < o.job.deadline_s + HEARD_S for o in self._jobs.values())

    def overdue(self) -> bool:
        """Whether some job is past its deadline: its call may still be at the blocks."""
        now = time.monotonic()
        return any(now - opened.started >= opened.job.deadline_s for opened in self._jobs.values())

    def free_blocks_soon(self) -> bool:
        """Whether a young save is all that keeps some block from being free."""
        now = time.monotonic()
        young = [i for i, o in self._jobs.items() if isinstance(o.job, SaveJob) and now - o.started < FREES_SOON_S]
        return self._pins.alone_on(young)

    def jobs(self) -> list[Job]:
        return [opened.job for opened in self._jobs.values()]

    def release_leases(self) -> None:
        for opened in self._jobs.values():
            self._end_lease(opened)

    def __len__(self) -> int:
        return len(self._jobs)
