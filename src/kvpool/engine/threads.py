"""Daemon worker threads that cannot die silently: a task that raises fails alone, the thread goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from vllm.logger import init_logger

from kvpool.engine.log_gate import LogGate

logger = init_logger("vllm.kvpool")

T = TypeVar("T")


class Ticket(Generic[T]):
    """The outcome of one task: ``wait`` for it, then read ``value`` or ``error``."""

    def __init__(self, task: Callable[[], T], log: LogGate) -> None:
        self._task: Callable[[], T] | None = task
        self._log = log
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        self._then: list[Callable[[Ticket[T]], None]] = []
        self.started: float | None = None  # time.monotonic() when a thread took it
        self.value: T | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self._ready.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ready.wait(max(0.0, timeout_s))

    def then(self, call: Callable[[Ticket[T]], None]) -> None:
        """Call ``call(self)`` once the task has ended: now if it has, else from the thread that ends it, before ``wait`` ends."""
        with self._lock:
            if not self._ended:
                self._then.append(call)
                return
        call(self)

    def cancel(self) -> None:
        """Not worth running any more: what it holds is dropped. One that runs already goes on."""
        self._task = None

    def run(self, failure: Exception | None) -> None:
        """In the thread that takes it. ``failure``: why this thread can run nothing."""
        self.started = time.monotonic()
        task, self._task = self._task, None
        try:
            if failure is not None:
                raise failure
            if task is not None:
                self.value = task()
        except Exception as error:
            more = self._log.ask("task")
            if more is not None:
                logger.exception("kvpool: a background task failed%s", more)
            self.error = error
        del task
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        for call in self._then:
            try:
                call(self)
            except Exception:
                more = self._log.ask("end")
                if more is not None:
                    logger.exception("kvpool: the end of a background task failed%s", more)
        self._ready.set()


class WorkerThreads:
    """``count`` daemon threads that take tasks in order; ``on_start`` is each one's first call.

    Daemons, because a store call that never returns must not block exit.
    """

    def __init__(self, name: str, count: int, on_start: Callable[[], None] | None = None) -> None:
        self._on_start = on_start
        self._log = LogGate()  # a store that always raises would fail thousands of tasks
        self._queue: queue.SimpleQueue[Ticket[Any] | None] = queue.SimpleQueue()
        self._waiting: dict[Ticket[Any], float] = {}  # since when, in order
        self._since: list[float | None] = [None] * count  # when each thread took the task it is at
        self._threads = [
            threading.Thread(target=self._loop, args=(i,), name=f"kvpool-{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], T]) -> Ticket[T]:
        ticket = Ticket(task, self._log)
        self._waiting[ticket] = time.monotonic()
        self._queue.put(ticket)
        return ticket

    def stuck_for(self) -> float:
        """Seconds for which every thread has been at one and the same task; 0 while one is free."""
        since = [s for s in self._since if s is not None]
        return time.monotonic() - max(since) if len(since) == len(self._since) else 0.0

    def backlog(self) -> int:
        """Tasks that wait for a thread."""
        return self._queue.qsize()

    def oldest(self) -> float:
        """Seconds for which the oldest of them has waited; 0 when none waits."""
        since = min(list(self._waiting.values()), default=None)  # the copy is one step: no other thread comes between
        return time.monotonic() - since if since is not None else 0.0

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and stop, within ``timeout_s``; False when a thread is still busy."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> Exception | None:
        """What ``on_start`` raised: every task of this thread then fails with it, instead of waiting for ever."""
        try:
            if self._on_start is not None:
                self._on_start()
        except Exception as error:
            logger.exception("kvpool: a thread could not start")
            return error
        return None

    def _loop(self, index: int) -> None:
        failure = self._start()
        while (ticket := self._queue.get()) is not None:
            self._waiting.pop(ticket, None)
            self._since[index] = time.monotonic()
            ticket.run(failure)
            self._since[index] = None
            del ticket  # drop references to blocks and buffers while idle
