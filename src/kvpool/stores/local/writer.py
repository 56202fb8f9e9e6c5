"""The only thread of a process that takes the index's write lock.

The lock has no timeout: a process that is stopped while it holds it blocks every other writer, and so does one that is stopped
inside a read, two transactions later. So callers hand their transaction to this thread as a job and wait with a deadline of their
own. A job that its caller gave up on is never committed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import lmdb

from kvpool.stores.local.clients import Removed
from kvpool.stores.local.index import Environment, LmdbTransaction, open_tables
from kvpool.stores.local.records import Records
from kvpool.stores.local.write_lock import READER_STOPPED, Abandoned, WriteLock

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BUSY = "the index is busy: another process keeps its write lock"
_SLOW_S = 0.05
_UNWAITED_S = 0.2  # for readers, by jobs that nobody waits for


@dataclass(frozen=True, slots=True)
class Again:
    """A step's answer: commit this much, run ``outside`` (slow work that needs no lock), and call the step again."""

    outside: Callable[[], None] | None = None


class Overdue(Exception):
    """The deadline passed before the transaction could run; nothing of it will happen."""


class Closed(Exception):
    """The store is closed."""


class Job(Generic[T]):
    """``step`` runs inside a transaction, as often as it answers Again. Its final answer becomes the result when it is
    committed."""

    def __init__(self, step: Callable[[Records], T | Again], obstacle: Callable[[], str] = lambda: _BUSY) -> None:
        self.step = step
        self._obstacle = obstacle
        self.lock = threading.Lock()
        self.given_up = False
        self.owed = False
        self._committed = False
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def decide(self, value: T) -> None:
        """It is committed; with ``lock`` held. From now on nobody gives up on it."""
        self._value = value
        self._committed = True

    def finish(self) -> None:
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self, deadline: float) -> T:
        """The result, or what the step raised. Overdue at ``deadline`` (time.monotonic()): then it has not happened and never
        will."""
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            with self.lock:
                if not (self._committed or self._done.is_set()):
                    self.given_up = True
                    raise Overdue(self._obstacle())
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def _owed(step: Callable[[Records], T | Again]) -> Job[T]:
    """A job that nobody waits for."""
    job: Job[T] = Job(step)
    job.owed = True
    return job


class WriterThread:
    """Runs jobs in the order in which they came."""

    def __init__(self, environment: Environment, lock: WriteLock, records: Callable[[LmdbTransaction], Records]) -> None:
        self._environment = environment
        self._env = environment.env
        self._lock = lock
        self._records = records
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._owed: list[Callable[[Records], Any]] = []
        self._obstacle = _BUSY  # if anything waits
        self.full = False  # the last transaction found no room in the index
        self._thread = threading.Thread(target=self._run, name="kvpool-index-writer", daemon=True)
        self._thread.start()

    def submit(self, step: Callable[[Records], T | Again]) -> Job[T]:
        if self._closed:
            raise Closed
        job: Job[T] = Job(step, lambda: self._obstacle)
        self._jobs.put(job)
        return job

    def cancel(self, step: Callable[[Records], int]) -> None:
        """Run a step that gives something back; when it fails it is tried again before each later job."""
        if self._closed:
            raise Closed
        self._jobs.put(_owed(step))

    def call(self, step: Callable[[Records], T | Again], deadline: float) -> T:
        """Run a step and wait for it."""
        return self.submit(step).wait(deadline)

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then stop. False when the thread still waits for the lock after ``timeout_s``."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._open_tables(job)
                self._pay()
                while not job.given_up and (again := self._attempt(job)) is not None:
                    if again.outside is not None:
                        again.outside()
            except BaseException as error:  # the caller gets it; this thread must live on
                if not isinstance(
                    error, lmdb.Error | OSError | Overdue | Removed
                ):  # those are told to the caller, this is a defect of ours
                    logger.warning("a job of the index failed", exc_info=True)
                if job.owed:
                    self._owed.append(job.step)
                job.fail(error)

    def _pay(self) -> None:
        """Make up for what could not be given back before."""
        if not self._owed:
            return
        owed = list(self._owed)
        with suppress(lmdb.Error, OSError, Overdue):
            self._attempt(_owed(lambda records: [step(records) for step in owed]))
            self._owed.clear()

    def _open_tables(self, job: Job[Any]) -> None:
        if not self._environment.tables:
            self._acquire(job)
            try:
                open_tables(self._environment)
            finally:
                self._lock.release()

    def _attempt(self, job: Job[Any]) -> Again | None:
        try:
            again = self._step(job)
        except lmdb.MapFullError:
            try:
                # What the last transaction set free can be used from the one after the next on.
                self._step(_owed(lambda records: records.add(b"probes", 1)))
                again = self._step(job)
            except lmdb.MapFullError:
                self.full = True
                raise
        self.full = False
        return again

    def _acquire(self, job: Job[Any]) -> None:
        """Take the write lock for a transaction of a job. Overdue when readers keep it off until its caller gives up."""

        def abandoned(waited: float) -> str | None:
            if waited > _SLOW_S:
                self._obstacle = READER_STOPPED
            unwaited = job.owed or self._closed
            return READER_STOPPED if job.given_up or (unwaited and waited > _UNWAITED_S) else None

        try:
            self._lock.acquire(abandoned)
        except Abandoned as error:
            raise Overdue(str(error)) from None
        self._obstacle = _BUSY

    def _step(self, job: Job[Any]) -> Again | None:
        """One transaction of a job; what to do before the next one, None when there is none."""
        self._acquire(job)
        try:
            if job.given_up:  # while this thread waited for the lock
                raise Overdue
            again = self._transaction(job)
        finally:
            self._lock.release()
        if again is None:
            job.finish()  # not before the lock is free: its caller may have the next job ready
        return again

    def _transaction(self, job: Job[Any]) -> Again | None:
        txn = self._env.begin(write=True)
        records: Records | None = None
        try:
            records = self._records(txn)
            answer = job.step(records)
            records.flush()
            if isinstance(answer, Again):
                txn.commit()
                return answer
            with job.lock:
                if not job.given_up:
                    txn.commit()
                    job.decide(answer)
                    return None
            raise Overdue
        except BaseException as error:
            if records is not None:
                records.slabs.forget()
            with suppress(lmdb.Error):  # a commit that failed has ended the transaction already
                txn.abort()
            if isinstance(error, Overdue):
                return None
            raise
