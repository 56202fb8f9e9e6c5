"""Objects written in pieces, through Mooncake's put sessions: nothing can be read before the session has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvpool.stores.base import Addresses, Hit, Result, Status, Writer
from kvpool.stores.checksums import PLAIN, TRAILER, Running
from kvpool.stores.mooncake import codes
from kvpool.stores.mooncake.client import name_of
from kvpool.stores.mooncake.room import with_room
from kvpool.stores.mooncake.sessions import Link
from kvpool.stores.opaque import BUSY, EXISTS
from kvpool.stores.pieces import Written, check_piece

_ENDED = Result(Status.FATAL, text="this writer has ended")
_DROPPED = Result(Status.FATAL, text="dropped by the caller")
_LEAST_S = 1.0  # for ending a session whose time is over


class MooncakeWriter(Writer):
    """A write returns when the library has let go of the memory: after its deadline too, at most the library's own 60 s."""

    def __init__(self, link: Link, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> None:
        self._link = link
        self._keys = list(keys)
        self._nbytes = nbytes
        self._until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._ended = False
        self._started = False
        self._given_up = False
        self._sessions: list[Result] | None = None  # what the start came to, in time
        self._written: dict[int, Written] = {}  # of the rows that have a session
        self._sums: dict[int, Running | None] = {}  # None: not written in order
        self.results = [BUSY] * len(keys)
        claimed = link.books.claim(self._keys)
        rows = list({key: row for row, key in reversed(list(enumerate(self._keys))) if key in claimed}.values())
        if rows:
            self._begin(sorted(rows))

    def _begin(self, rows: list[int]) -> None:
        try:
            begun = self._link.calls.ask(lambda: self._start(rows), self._until - time.monotonic())
        except Exception as error:  # noqa: BLE001 - travels in the results
            with self._lock:
                started, sessions = self._started, self._sessions
                self._given_up = sessions is None
            begun = sessions or [self._link.fault(error)] * len(rows)
            if not started:  # and never will; else the keys are given up there
                self._link.books.give_up([self._keys[row] for row in rows])
        for row, result in zip(rows, begun, strict=True):
            self.results[row] = result
            if result.status is Status.OK:
                self._written[row], self._sums[row] = Written(), Running()

    def _start(self, rows: list[int]) -> list[Result]:
        """On a native thread. Sessions that come when nobody waits for them any more are revoked again."""
        keys = [self._keys[row] for row in rows]
        with self._lock:
            if self._given_up:
                raise TimeoutError("given up before it began")
            self._started = True
        try:
            return self._start_sessions(keys)
        except BaseException:
            self._link.books.give_up(keys)
            raise

    def _start_sessions(self, keys: list[bytes]) -> list[Result]:
        total = self._nbytes + (TRAILER if self._link.trailer else 0)

        def attempt(chosen: Sequence[int]) -> list[Result]:
            names = [name_of(keys[place]) for place in chosen]
            return codes.put_results(
                self._link.client.batch_put_session_start(names, [total] * len(names), self._link.config), len(names), 0
            )

        results = with_room(len(keys), self._until, attempt)
        taken = [place for place, result in enumerate(results) if result.code in (codes.EXISTS, codes.NO_SESSION)]
        there = self._link.look([keys[place] for place in taken]) if taken else []
        for place, answer in zip(taken, there, strict=True):
            results[place] = EXISTS if isinstance(answer, Hit) else BUSY
        with self._lock:
            late = self._given_up
            self._sessions = None if late else results
        begun = [key for key, result in zip(keys, results, strict=True) if result.status is Status.OK]
        if late and begun:
            self._link.client.batch_put_session_revoke([name_of(key) for key in begun])
        self._link.books.give_up(keys if late else sorted(set(keys) - set(begun)))
        return results

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self._keys), offset, addresses, sizes)
        if end > self._nbytes:
            raise ValueError(f"bytes {offset} to {end} of objects of {self._nbytes} bytes")
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        mine = [place for place, row in enumerate(rows) if row in self._written and not self._ended]
        if not mine:
            return results
        names = [name_of(self._keys[rows[place]]) for place in mine]
        pointers, lengths = addresses[mine].tolist(), sizes.tolist()
        offsets = (offset + np.cumsum(sizes) - sizes).tolist()

        def work() -> list[int]:
            count = len(names)
            return self._link.client.batch_put_from_multi_buffer_ranges(names, pointers, [lengths] * count, [offsets] * count)

        outcome = transferred(self._link, work, self._until, len(mine), end - offset)
        with self._lock:
            for place, pointer, result in zip(mine, pointers, outcome, strict=True):
                results[place] = result
                self._note(rows[place], result.status is Status.OK, offset, end, pointer, lengths)
        return results

    def _note(self, row: int, ok: bool, offset: int, end: int, pointer: list[int], lengths: list[int]) -> None:
        (self._written[row].add if ok else self._written[row].cut)(offset, end)
        running = self._sums[row]
        if not ok or running is None or not self._link.trailer:
            return
        if running.position == offset:
            running.add(pointer, lengths)
        else:
            self._sums[row] = None

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        results = list(self.results)
        with self._lock:
            if self._ended:
                return [result if result.status is not Status.OK else _ENDED for result in results]
            self._ended = True
        chosen = set(self._written if rows is None else rows)
        whole = [row for row in self._written if row in chosen and self._written[row].covers(self._nbytes)]
        for row in self._written:
            results[row] = _DROPPED if row not in chosen else Result(Status.FATAL, text="not every byte was written")
        outcome = self._finish(whole)
        for row, result in zip(whole, outcome, strict=True):
            results[row] = result
        return results

    def abort(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._finish([])

    def _finish(self, whole: list[int]) -> list[Result]:
        """Publish these rows and drop the others. Keys stay claimed until the library has answered."""
        begun = [self._keys[row] for row in self._written]
        if not begun:
            return []

        def work() -> list[Result]:
            try:
                results = self._publish(whole) if whole else []
                stored = {self._keys[row] for row, result in zip(whole, results, strict=True) if result.status is Status.OK}
                if rest := [name_of(key) for key in begun if key not in stored]:
                    self._link.client.batch_put_session_revoke(rest)
                return results
            finally:
                self._link.books.give_up(begun)

        try:
            return self._link.calls.ask(work, max(self._until - time.monotonic(), _LEAST_S))
        except Exception as error:  # noqa: BLE001 - travels in the results
            return [self._link.fault(error)] * len(whole)

    def _publish(self, whole: list[int]) -> list[Result]:
        names = [name_of(self._keys[row]) for row in whole]
        if self._link.trailer:
            trailers = b"".join(self._trailer(row) for row in whole)
            memory = np.frombuffer(trailers, dtype=np.uint8)
            places = [[int(memory.ctypes.data) + TRAILER * i] for i in range(len(whole))]
            count = len(whole)
            written = self._link.client.batch_put_from_multi_buffer_ranges(
                names, places, [[TRAILER]] * count, [[self._nbytes]] * count
            )
            codes.check_count(written, count)
            if any(code != TRAILER for code in written):
                bad = next(code for code in written if code != TRAILER)
                return [codes.failure(bad)] * count
        return codes.put_results(self._link.client.batch_put_session_end(names), len(names), self._nbytes)

    def _trailer(self, row: int) -> bytes:
        running = self._sums[row]
        return running.trailer() if running is not None and running.position == self._nbytes else PLAIN


def transferred(link: Link, work: Callable[[], list[int]], until: float, count: int, nbytes: int) -> list[Result]:
    """The results of a call that uses the caller's memory: it is waited for as long as it takes."""
    call = link.calls.begin(work, until - time.monotonic())
    while not call.wait(1.0):
        pass
    try:
        moved = call.value()
        codes.check_count(moved, count)
    except Exception as error:  # noqa: BLE001 - travels in the results
        return [link.fault(error)] * count
    return [Result(Status.OK, nbytes, code) if code == nbytes else codes.failure(min(code, -1)) for code in moved]
