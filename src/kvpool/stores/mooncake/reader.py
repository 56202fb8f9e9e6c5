"""Objects read in pieces, through Mooncake's get sessions.

A session holds the master's lease. Where the lease runs out before the reader ends, the session is begun again: what comes then is
the same object, or it is missing. Bytes that are read in order are checked against the object's checksum with the last piece.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.base import UNKNOWN, Addresses, Batch, Hit, Reader, Result, Status
from kvpool.stores.checksums import PLAIN, TRAILER, Running
from kvpool.stores.mooncake import codes
from kvpool.stores.mooncake.client import name_of
from kvpool.stores.mooncake.sessions import Link
from kvpool.stores.mooncake.writer import transferred
from kvpool.stores.opaque import DAMAGED, NO_ANSWER
from kvpool.stores.pieces import check_piece

_ENDED = Result(Status.FATAL, text="this reader has ended")
_AGAIN = (codes.LEASE_EXPIRED, codes.NO_SESSION)


class MooncakeReader(Reader):
    """A read returns when the library has let go of the memory: after its deadline too, at most the library's own 60 s."""

    def __init__(self, link: Link, keys: Sequence[bytes], deadline_s: float) -> None:
        self._link = link
        self._keys = list(keys)
        self._until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._ended = False
        self._starting = False
        self._nbytes: dict[int, int] = {}
        self._held: list[bytes] = []
        self._copies: dict[int, NDArray[np.uint8]] = {}  # of objects that lie on a disk, which sessions cannot read
        self._sums: dict[int, Running | None] = {}
        self.results = [Result(Status.MISSING)] * len(keys)
        try:
            self.results = link.calls.ask(self._start, deadline_s) if keys else []
        except Exception as error:  # noqa: BLE001 - travels in the results
            self.results = [link.fault(error)] * len(keys)
            self.end()

    def _start(self) -> list[Result]:
        """On a native thread. Sessions of a reader that has ended meanwhile are ended here."""
        with self._lock:
            if self._ended:
                raise TimeoutError("ended before it began")
            self._starting = True
        try:
            return self._start_sessions()
        finally:
            with self._lock:
                self._starting = False
                late = self._ended
            if late:
                self._let_go()

    def _start_sessions(self) -> list[Result]:
        results = [Result(Status.MISSING)] * len(self._keys)
        found: list[int] = []
        for row, answer in enumerate(self._link.look(self._keys)):
            if isinstance(answer, Hit):
                self._nbytes[row], self._sums[row] = answer.nbytes, Running()
                found.append(row)
            elif answer is UNKNOWN:
                results[row] = NO_ANSWER
        if not found:
            return results
        self._held = [self._keys[row] for row in found]
        self._link.books.read(self._held)
        begun = self._link.client.batch_get_session_start([name_of(self._keys[row]) for row in found])
        codes.check_count(begun, len(found))
        for row, code in zip(found, begun, strict=True):
            results[row] = Result(Status.OK) if code == 0 else codes.failure(code)
            if code == codes.ONLY_ON_DISK and self._link.host:
                results[row] = self._copy(row)
        return results

    def _copy(self, row: int) -> Result:
        """Read an object from a disk as a whole, into memory of this process."""
        memory = np.empty(self._nbytes[row], dtype=np.uint8)
        address, size = np.array([[memory.ctypes.data]], dtype=np.int64), np.array([len(memory)], dtype=np.int64)
        (result,) = self._link.fetch(Batch([self._keys[row]], address, size), self._until)
        if result.status is Status.OK:
            self._copies[row] = memory
        return result._replace(nbytes=0)

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        end = self._end_of(rows, offset, addresses, sizes)
        results = [self.results[row] if self.results[row].status is not Status.OK else _ENDED for row in rows]
        mine = [place for place, row in enumerate(rows) if self.results[row].status is Status.OK and not self._ended]
        for place in [place for place in mine if rows[place] in self._copies]:
            results[place] = self._from_copy(rows[place], offset, addresses[place].tolist(), sizes.tolist())
        far = [place for place in mine if rows[place] not in self._copies]
        for last in (False, True):
            part = [place for place in far if (self._nbytes[rows[place]] == end and self._link.trailer) is last]
            if part:
                outcome = self._from_session([rows[place] for place in part], offset, end, addresses[part], sizes, trailer=last)
                for place, result in zip(part, outcome, strict=True):
                    results[place] = result
        return results

    def _from_copy(self, row: int, offset: int, addresses: list[int], sizes: list[int]) -> Result:
        source = self._copies[row].ctypes.data + offset
        for address, nbytes in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, source, nbytes)
            source += nbytes
        return Result(Status.OK, sum(sizes))

    def _from_session(
        self, rows: list[int], offset: int, end: int, addresses: Addresses, sizes: Addresses, *, trailer: bool
    ) -> list[Result]:
        """With the last piece of an object comes its trailer."""
        trailers = np.zeros((len(rows), TRAILER), dtype=np.uint8)
        pointers, lengths = addresses.tolist(), sizes.tolist()
        if trailer:
            wider = [[*row, int(trailers.ctypes.data) + TRAILER * i] for i, row in enumerate(pointers)]
            moved, all_lengths = wider, [*lengths, TRAILER]
        else:
            moved, all_lengths = pointers, lengths
        offsets = (offset + np.cumsum(all_lengths) - all_lengths).tolist()
        names = [name_of(self._keys[row]) for row in rows]
        results = transferred(
            self._link, lambda: self._ranges(names, moved, all_lengths, offsets), self._until, len(rows), sum(all_lengths)
        )
        for i, row in enumerate(rows):
            if results[i].status is Status.OK:
                intact = self._check(row, offset, pointers[i], lengths, trailers[i].tobytes() if trailer else b"")
                results[i] = Result(Status.OK, end - offset) if intact else DAMAGED
        if bad := [self._keys[row] for i, row in enumerate(rows) if results[i] is DAMAGED]:
            self._link.calls.begin(lambda: self._link.quarantine(bad), 5.0)
        return results

    def _ranges(self, names: list[str], pointers: list[list[int]], lengths: list[int], offsets: list[int]) -> list[int]:
        """On a native thread. Sessions whose lease has run out are begun again, once."""
        client, count = self._link.client, len(names)
        moved = client.batch_get_into_multi_buffer_ranges(names, pointers, [lengths] * count, [offsets] * count)
        lost = [i for i, code in enumerate(moved) if code in _AGAIN]
        if not lost:
            return moved
        begun = client.batch_get_session_start([names[i] for i in lost])
        codes.check_count(begun, len(lost))
        ready = [i for i, code in zip(lost, begun, strict=True) if code == 0]
        for i, code in zip(lost, begun, strict=True):
            moved[i] = code
        if ready:
            again = client.batch_get_into_multi_buffer_ranges(
                [names[i] for i in ready], [pointers[i] for i in ready], [lengths] * len(ready), [offsets] * len(ready)
            )
            for i, code in zip(ready, again, strict=True):
                moved[i] = code
        return moved

    def _check(self, row: int, offset: int, pointer: list[int], lengths: list[int], trailer: bytes) -> bool:
        """False where the whole object has been read in order and does not match its trailer."""
        if not self._link.trailer:
            return True
        with self._lock:
            running = self._sums[row]
            if running is None or running.position != offset:
                self._sums[row] = None
                return True
            running.add(pointer, lengths)
            return not trailer or trailer == PLAIN or trailer == running.trailer()

    def _end_of(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> int:
        """Where the piece ends. ValueError for wrong shapes, and beyond an object."""
        end = check_piece(rows, len(self._keys), offset, addresses, sizes)
        short = [row for row in rows if row in self._nbytes and self._nbytes[row] < end]
        if short:
            raise ValueError(f"bytes {offset} to {end} of an object of {self._nbytes[short[0]]} bytes")
        return end

    def end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            starting = self._starting
        if not starting:
            self._let_go()

    def _let_go(self) -> None:
        self._copies = {}
        ended = self._link.books.unread(self._held)
        if ended:
            self._link.calls.begin(lambda: self._link.client.batch_get_session_end([name_of(key) for key in ended]), 5.0)
