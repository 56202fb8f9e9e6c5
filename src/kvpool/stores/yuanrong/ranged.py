"""Objects written and read in pieces, in the memory of the client process.

Memory for a new object is seen by nobody before it is published, and the datasystem does not know that somebody is writing it: that
a key is being written is known inside one store only. Two stores that write one key at once both succeed, whole, and the later one
stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvpool.stores.base import Addresses, Answer, Hit, Reader, Result, Status, Tier, Writer
from kvpool.stores.pieces import Written, check_piece
from kvpool.stores.yuanrong.child import Child
from kvpool.stores.yuanrong.messages import Buffer
from kvpool.stores.yuanrong.transfers import HostTransfers, read_from, write_into

Fault = Callable[[BaseException], Result]
Look = Callable[[Sequence[bytes]], list[Answer]]

_BUSY = Result(Status.BUSY, text="it is being written")
_EXISTS = Result(Status.EXISTS)
_DROPPED = Result(Status.FATAL, text="dropped by the caller")
_ENDED = Result(Status.FATAL, text="this writer or reader has ended")
_PARTIAL = Result(Status.FATAL, text="not every byte was written")
_GONE = Result(Status.BUSY, text="published, and not there: somebody removed it, or it was evicted")


class BeingWritten:
    """Keys that writers of one store have begun. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[bytes] = set()

    def claim(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys are this caller's now; of a key given twice, the first."""
        with self._lock:
            mine = []
            for key in keys:
                mine.append(key not in self._keys)
                self._keys.add(key)
            return mine

    def release(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._keys.difference_update(keys)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._keys for key in keys]


class PieceWriter(Writer):
    """Thread-safe; one piece after the other."""

    def __init__(
        self,
        transfers: HostTransfers,
        look: Look,
        fault: Fault,
        busy: BeingWritten,
        keys: Sequence[bytes],
        nbytes: int,
        deadline_s: float,
    ) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._transfers, self._look, self._fault, self._busy = transfers, look, fault, busy
        self._keys, self._nbytes = list(keys), nbytes
        self._lock = threading.Lock()
        self._buffers: dict[int, Buffer] = {}
        self._written: dict[int, Written] = {}
        self._child: Child | None = None
        self._ended = False
        claimed = busy.claim(self._keys)
        self.results = [Result(Status.OK) if mine else _BUSY for mine in claimed]
        rows = [row for row, mine in enumerate(claimed) if mine]
        try:
            self._begin(rows)
        except Exception as error:  # noqa: BLE001 - travels in the results
            for row in rows:
                self.results[row] = fault(error)
        busy.release([self._keys[row] for row in rows if row not in self._buffers])

    def _begin(self, rows: Sequence[int]) -> None:
        there = self._look([self._keys[row] for row in rows])
        free = []
        for row, answer in zip(rows, there, strict=True):
            if isinstance(answer, Hit):
                self.results[row] = _EXISTS
            else:
                free.append(row)
        if not free:
            return
        buffers, self._child = self._transfers.create([self._keys[row] for row in free], self._nbytes, self._left())
        self._buffers = dict(zip(free, buffers, strict=True))
        self._written = {row: Written() for row in free}

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self._keys), offset, addresses, sizes)
        if end > self._nbytes:
            raise ValueError(f"bytes {offset} to {end} of objects of {self._nbytes} bytes")
        with self._lock:
            results = [result if (result := self.results[row]).status is not Status.OK else _ENDED for row in rows]
            mine = [place for place, row in enumerate(rows) if row in self._buffers]
            if self._ended or self._child is None or not mine:
                return results
            outcome = Result(Status.OK, end - offset)
            try:
                write_into(self._child, [self._buffers[rows[place]] for place in mine], offset, chosen(addresses, mine), sizes)
            except Exception as error:  # noqa: BLE001 - travels in the results
                outcome = self._fault(error)
            for place in mine:
                written = self._written[rows[place]]
                (written.add if outcome.status is Status.OK else written.cut)(offset, end)
                results[place] = outcome
        return results

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        """Once; the objects that somebody else stored meanwhile are EXISTS."""
        with self._lock:
            results = list(self.results)
            if self._ended or self._child is None:
                return [result if result.status is not Status.OK else _ENDED for result in results]
            picked = set(self._buffers if rows is None else rows)
            for row in self._buffers:
                results[row] = _PARTIAL if row in picked else _DROPPED
            whole = [row for row in self._buffers if row in picked and self._written[row].covers(self._nbytes)]
            try:
                for row, result in zip(whole, self._publish(whole, self._child), strict=True):
                    results[row] = result
            except Exception as error:  # noqa: BLE001 - travels in the results
                for row in whole:
                    results[row] = self._fault(error)
            self._finish()
        return results

    def _publish(self, rows: Sequence[int], child: Child) -> list[Result]:
        """Only what can be read afterwards has been stored."""
        keys = [self._keys[row] for row in rows]
        there = [isinstance(answer, Hit) for answer in self._look(keys)] if keys else []
        new = [row for row, found in zip(rows, there, strict=True) if not found]
        if new:
            self._transfers.publish([self._buffers[row] for row in new], child, max(self._left(), 1.0))
        sure = iter(self._look([self._keys[row] for row in new]) if new else [])
        good = Result(Status.OK, self._nbytes, tier=Tier.REMOTE)
        return [_EXISTS if found else good if isinstance(next(sure), Hit) else _GONE for found in there]

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def abort(self) -> None:
        with self._lock:
            if not self._ended:
                self._finish()

    def _finish(self) -> None:
        self._ended = True
        if self._child is not None:
            self._child.drop([buffer.number for buffer in self._buffers.values()])
        self._busy.release([self._keys[row] for row in self._buffers])


class PieceReader(Reader):
    """Holds the memory of its objects until ``end``: they can be read whatever becomes of them. Thread-safe."""

    def __init__(self, transfers: HostTransfers, fault: Fault, keys: Sequence[bytes], deadline_s: float) -> None:
        self._fault = fault
        self._lock = threading.Lock()
        self._buffers: dict[int, Buffer] = {}
        self._child: Child | None = None
        self.results = [Result(Status.MISSING)] * len(keys)
        if not keys:
            return
        try:
            buffers, self._child = transfers.open(keys, deadline_s)
        except Exception as error:  # noqa: BLE001 - travels in the results
            self.results = [fault(error)] * len(keys)
            return
        self._buffers = {row: buffer for row, buffer in enumerate(buffers) if buffer is not None}
        for row in self._buffers:
            self.results[row] = Result(Status.OK, tier=Tier.REMOTE)

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = check_piece(rows, len(self.results), offset, addresses, sizes)
        with self._lock:
            short = [row for row in rows if row in self._buffers and self._buffers[row].nbytes < end]
            if short:
                raise ValueError(f"bytes {offset} to {end} of an object of {self._buffers[short[0]].nbytes} bytes")
            results = [result if (result := self.results[row]).status is not Status.OK else _ENDED for row in rows]
            mine = [place for place, row in enumerate(rows) if row in self._buffers]
            if self._child is None or not mine:
                return results
            outcome = Result(Status.OK, end - offset)
            try:
                read_from(self._child, [self._buffers[rows[place]] for place in mine], offset, chosen(addresses, mine), sizes)
            except Exception as error:  # noqa: BLE001 - travels in the results
                outcome = self._fault(error)
            for place in mine:
                results[place] = outcome
        return results

    def end(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.drop([buffer.number for buffer in self._buffers.values()])
            self._buffers, self._child = {}, None


def chosen(addresses: Addresses, places: Sequence[int]) -> Addresses:
    """Some rows."""
    return addresses[np.array(places, dtype=np.int64)]
