"""Calls of a library that block and cannot be abandoned: they run on threads of their own.

A deadline ends the *wait* for such a call and never the call: memory that a running call was given stays in use until ``done()``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvpool.stores.base import Result, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Closed(Exception):
    """The store is closed: its library is not to be called any more."""


class Call(Generic[T]):
    """One call: waiting, running or done. Thread-safe."""

    def __init__(self, work: Callable[[], T], until: float) -> None:
        self._work = work
        self._until = until
        self._lock = threading.Lock()
        self._begun = False
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """On a native thread. A call whose deadline passed while it waited for its turn does not begin."""
        with self._lock:
            if self._done.is_set():
                return
            self._begun = True
        try:
            if time.monotonic() > self._until:
                raise TimeoutError("the deadline passed before the call began")
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 - whatever a library does ends this call, never the thread
            self._error = error
        self._done.set()

    def cancel(self, error: BaseException) -> bool:
        """True: it has not begun and never will, or it is done."""
        with self._lock:
            if not self._begun and not self._done.is_set():
                self._error = error
                self._done.set()
        return self._done.is_set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(max(timeout_s, 0.0))

    def value(self) -> T:
        """What the call returned; raises what it raised. ValueError while it is not done."""
        if not self._done.is_set():
            raise ValueError("the call is not done")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class NativeCalls:
    """``threads`` daemon threads that take calls in order. ``close`` is final."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._limit = threads
        self._queue: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._open: set[Call[object]] = set()
        self._closed = False

    def begin(self, work: Callable[[], T], deadline_s: float) -> Call[T]:
        """Queue a call; it is done at once, with Closed, after ``close``, and with OSError where no thread can be started."""
        call: Call[T] = Call(work, time.monotonic() + deadline_s)
        with self._lock:
            if self._closed:
                call.cancel(Closed("the store is closed"))
                return call
            self._open.add(call)  # type: ignore[arg-type]
            if len(self._threads) < min(self._limit, len(self._open)):
                self._add_thread()
            if not self._threads:
                self._open.discard(call)
                call.cancel(OSError(f"no thread for calls of {self._name} can be started"))
                return call
        self._queue.put(call)  # type: ignore[arg-type]
        return call

    def _add_thread(self) -> None:
        """Where the system has none left, those that are there take the call, and the next call tries again."""
        thread = threading.Thread(target=self._serve, name=f"kvpool-{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            logger.warning("kvpool: no further thread for calls of %s can be started", self._name, exc_info=True)
            return
        self._threads.append(thread)

    def ask(self, work: Callable[[], T], deadline_s: float) -> T:
        """The value of a call; TimeoutError when it does not come in time. For calls that use no memory of the caller."""
        call = self.begin(work, deadline_s)
        if not call.wait(deadline_s) and not call.cancel(TimeoutError("no answer in time")):
            raise TimeoutError(f"no answer within {deadline_s:g} s")
        return call.value()

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            with self._lock:
                self._open.discard(call)

    def close(self, timeout_s: float) -> bool:
        """No call begins from now on; wait for those that run. True: none runs any more, the library may be closed."""
        with self._lock:
            self._closed = True
            calls, threads = list(self._open), len(self._threads)
        end = time.monotonic() + timeout_s
        for call in calls:
            call.cancel(Closed("the store is closed"))
        for _ in range(threads):
            self._queue.put(None)
        return all(call.wait(end - time.monotonic()) for call in calls)


class Transfer:
    """The handle of a put or get that runs as a native call: one result per key, whatever the call did."""

    def __init__(self, call: Call[list[Result]], count: int, fault: Callable[[BaseException], Result]) -> None:
        self._call = call
        self._count = count
        self._fault = fault

    def done(self) -> bool:
        return self._call.done()

    def wait(self, timeout_s: float) -> bool:
        return self._call.wait(timeout_s)

    def results(self) -> list[Result]:
        if not self._call.done():
            raise ValueError("the transfer is not done")
        try:
            results = self._call.value()
        except BaseException as error:  # noqa: BLE001 - it becomes the result of every key
            return [self._fault(error)] * self._count
        if len(results) != self._count:
            return [Result(Status.FATAL, text=f"{len(results)} answers for {self._count} keys")] * self._count
        return results

    def abandon(self) -> bool:
        return self._call.cancel(TimeoutError("abandoned before it began"))
