"""A client process seen from the store: requests out, replies in, copies into and out of its memory."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Unpack

import numpy as np

import kvpool
from kvpool.devices.affinity import OPENMP_BINDINGS
from kvpool.devices.process_memory import Int64
from kvpool.stores.yuanrong import far_memory, library
from kvpool.stores.yuanrong.codes import LibraryError
from kvpool.stores.yuanrong.messages import Channel, Fields, Reply, Request, Settings, Verb

Move = Callable[[int, Int64, Int64, Int64], None]
_TICK_S = 1.0
FROZEN_S = 20.0
"""After a standstill this long (a paused container, a suspended machine) the worker may have taken the client for dead and given
its memory to others. It waits client_dead_timeout_s for that, 120 by default."""
_END_S = 2.0  # a process that was told to end is given that long


class _Wait:
    """A reply to come; None once the process has ended."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.arrived = threading.Event()
        self.reply: Reply | None = None


class Child:
    """One client process. Thread-safe. It is dead from the moment it closes its end, and stays so."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs.fileno())
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._greeting = _Wait()
        self._waits: dict[int, _Wait] = {0: self._greeting}
        self._dead = False
        self._copies = 0
        self._tick = _now()
        self._out: queue.SimpleQueue[Settings | Request | None] = queue.SimpleQueue()
        self._out.put(settings)
        for work in (self._send, self._receive):
            threading.Thread(target=work, name=f"kvpool-yuanrong-{work.__name__.strip('_')}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._dead

    def waited_s(self) -> float:
        """How long the oldest request, or the greeting, has been waited for; 0 where nothing is."""
        with self._lock:
            oldest = min((wait.since for wait in self._waits.values()), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def greeting(self, timeout_s: float) -> Reply:
        """What the process says once it has reached its worker."""
        if not self._greeting.arrived.wait(max(timeout_s, 0.0)):
            raise TimeoutError("the worker has not been reached yet")
        return _content(self._greeting)

    def ask(self, verb: Verb, until: float, **fields: Unpack[Fields]) -> Reply:
        wait = _Wait()
        with self._lock:
            if self._dead:
                raise ConnectionError("the client process ended")
            number = next(self._numbers)
            self._waits[number] = wait
        self._out.put(Request(number, verb, until, **fields))
        if not wait.arrived.wait(max(until - time.monotonic(), 0.0)):
            with self._lock:
                late = wait.arrived.is_set()
                wait.reply = wait.reply if late else Reply(number, error="given up")
            if not late:
                raise TimeoutError("no answer from the worker in time")
        return _content(wait)

    def drop(self, buffers: list[int]) -> None:
        """Let go of memory; without an answer."""
        if buffers and not self._dead:
            self._out.put(Request(0, "drop", 0.0, buffers=buffers))

    def write(self, far: Int64, near: Int64, sizes: Int64) -> None:
        """Copy from here into memory of the process: ``sizes[i]`` bytes from ``near[i]`` to ``far[i]``. OSError where it ended."""
        self._copy(far_memory.write, far, near, sizes)

    def read(self, far: Int64, near: Int64, sizes: Int64) -> None:
        self._copy(far_memory.read, far, near, sizes)

    def _copy(self, move: Move, far: Int64, near: Int64, sizes: Int64) -> None:
        self._beat()
        with self._lock:
            if self._dead:
                raise ConnectionError("the client process ended")
            self._copies += 1  # its pid is not given to another process meanwhile
        try:
            move(self.pid, far, near, sizes)
        finally:
            with self._lock:
                self._copies -= 1
            self._reap()

    # threads

    def _send(self) -> None:
        while True:
            self._beat()
            try:
                message = self._out.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            try:
                self._channel.send(message)
            except OSError:
                return  # it ended; the receiver sees to the rest

    def _beat(self) -> None:
        """Called at least every ``_TICK_S`` by a thread that never waits for anything else, and before every copy."""
        now = _now()
        frozen, self._tick = now - self._tick, now
        if frozen > FROZEN_S:
            self.close()

    def _receive(self) -> None:
        with suppress(Exception):  # whatever ends the reading, a damaged message included, ends the process
            while (reply := self._channel.receive(Reply)) is not None:
                self._take(reply)
        self.close()

    def _take(self, reply: Reply) -> None:
        with self._lock:
            wait = self._waits.pop(reply.number, None)
            wanted = wait is not None and wait.reply is None
            if wait is not None and wanted:
                wait.reply = reply
                wait.arrived.set()
        if not wanted:
            self.drop([buffer.number for buffer in reply.buffers if buffer is not None])

    # the end

    def close(self) -> None:
        """End the process; idempotent. Calls that wait get a ConnectionError."""
        with self._lock:
            first, self._dead = not self._dead, True
            waits, self._waits = list(self._waits.values()), {}
            for wait in waits:
                wait.arrived.set()
        if not first:
            return
        self._out.put(None)
        self._channel.close()
        threading.Thread(target=self._end, name="kvpool-yuanrong-end", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the process; True when it has ended."""
        end = time.monotonic() + timeout_s
        while (there := self._runs()) and time.monotonic() < end:
            time.sleep(0.01)
        return not there

    def _runs(self) -> bool:
        with self._lock:
            return self._process.returncode is None and _runs(self.pid)

    def _end(self) -> None:
        if not self.join(_END_S):
            with self._lock, suppress(ProcessLookupError):
                if self._process.returncode is None:  # not reaped: the pid is still its own
                    os.kill(self.pid, signal.SIGKILL)
        self.join(_END_S)
        self._reap()

    def _reap(self) -> None:
        with self._lock:
            if self._dead and not self._copies:
                self._process.poll()


def _now() -> float:
    """Goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _content(wait: _Wait) -> Reply:
    if wait.reply is None:
        raise ConnectionError("the client process ended")
    if wait.reply.error:
        raise LibraryError(wait.reply.error)
    return wait.reply


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C in the engine's terminal does not end it first."""
    env = {name: value for name, value in os.environ.items() if name not in OPENMP_BINDINGS}
    folder = library.make_log_folder(env)
    source = str(Path(kvpool.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "kvpool.stores.yuanrong.client_process", str(descriptor)]
    with Path(folder, "kvpool-client.log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=[descriptor], start_new_session=True
        )


def _runs(pid: int) -> bool:
    """Whether a child of this process has not ended; it stays to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def flat(starts: Int64, offsets: Int64) -> Int64:
    """``starts[i] + offsets[j]`` for all i and j, row by row."""
    return (starts[:, None] + offsets[None, :]).ravel()


def offsets_of(sizes: Int64, first: int = 0) -> Int64:
    """Where each segment begins in its object."""
    return np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64) + first if len(sizes) else sizes
