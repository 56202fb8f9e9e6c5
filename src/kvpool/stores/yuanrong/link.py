"""The way to one client process: starts it, asks it, replaces it when it has ended or hangs."""

from __future__ import annotations

import threading
import time
from typing import Unpack

from kvpool.stores.native import Closed
from kvpool.stores.yuanrong.child import Child
from kvpool.stores.yuanrong.messages import Fields, Reply, Settings, Verb

RETRY_S = 1.0  # between the starts of two client processes
HANG_S = 5.0  # what a call may take beyond all of the library's own timeouts


class Link:
    """Thread-safe. ``slowest_s``: the longest that the library may take by its own timeouts. ``patience_s``: calls fail at once
    while an earlier one has been waiting longer than that."""

    def __init__(self, settings: Settings, slowest_s: float, patience_s: float) -> None:
        self._settings = settings
        self._slowest = slowest_s
        self._patience = patience_s
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._started = 0.0
        self._refused: OSError | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process, and let it connect while others are started."""
        self._current()

    def open(self, deadline_s: float) -> tuple[Reply, Child]:
        """The greeting. LibraryError or TimeoutError where the worker is not reached; OSError where no process can be started."""
        child = self._current()
        return self._greeting(child, deadline_s), child

    def ask(self, verb: Verb, deadline_s: float, **fields: Unpack[Fields]) -> tuple[Reply, Child]:
        """The reply, and the process that gave it: buffers are in its memory.

        LibraryError: the library said no. TimeoutError: no answer in time, and none will be used. ConnectionError: the process
        ended. Closed after ``close``."""
        until = time.monotonic() + deadline_s
        child = self._current()
        waited = child.waited_s()
        if waited > self._patience:
            raise TimeoutError(f"an earlier call has been waiting for the worker for {waited:.1f} s")
        self._greeting(child, until - time.monotonic())
        return child.ask(verb, until, **fields), child

    def _greeting(self, child: Child, timeout_s: float) -> Reply:
        try:
            return child.greeting(timeout_s)
        except TimeoutError:
            raise  # it goes on connecting, and a later call finds it
        except OSError as error:
            self._refused = error
            child.close()
            raise

    def _current(self) -> Child:
        """The process that lives, or a new one; not more than one a second."""
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            child = self._child
            if child is not None and child.waited_s() > self._slowest + HANG_S:
                child.close()
            if child is not None and child.alive():
                return child
            now = time.monotonic()
            if child is not None and now - self._started < RETRY_S:
                raise self._refused or ConnectionError("the client process ended")
            self._started, self._refused = now, None
            self._child = Child(self._settings)
            return self._child

    def close(self) -> None:
        """Ends the process; waits for that at most a few seconds."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.close()
            child.join(HANG_S)
