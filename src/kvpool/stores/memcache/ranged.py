"""Objects in pieces: room is allocated by key, copied into by its global address, and published when it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvpool.stores.base import Addresses, Reader, Result, Status, Writer
from kvpool.stores.memcache import half_written
from kvpool.stores.memcache.codes import BEING_WRITTEN, FAILED, failed, get_result, put_result, text_of
from kvpool.stores.memcache.directions import MEDIUM_DRAM, Directions
from kvpool.stores.memcache.leases import Leases
from kvpool.stores.memcache.library import Client
from kvpool.stores.memcache.states import KeyState, key_states

READ_LEASE_S = 60.0
CLEAN_UP_S = 30.0


class Calls(Protocol):
    """How sessions reach the library: on a native thread, one result per row whatever happens; it returns when the library is done
    with the caller's memory."""

    def __call__(self, work: Callable[[Client], list[Result]], count: int, until: float) -> list[Result]: ...


def check_pieces(rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses, nbytes: int) -> int:
    """How many bytes of each row; ValueError for pieces that lie outside the object, or that do not fit the rows."""
    if addresses.shape != (len(rows), len(sizes)):
        raise ValueError(f"addresses have shape {addresses.shape}, expected {(len(rows), len(sizes))}")
    length = int(sizes.sum())
    if offset < 0 or offset + length > nbytes:
        raise ValueError(f"bytes {offset} to {offset + length} of an object of {nbytes}")
    return length


def copy(client: Client, starts: Sequence[int], addresses: Addresses, sizes: Addresses, direction: int) -> int:
    """Copy the segments of each row from or to its start, in one call; the library's code. Not 0: any part may have been copied."""
    lengths: list[int] = sizes.tolist()
    return client.batch_copy_layers(list(starts), addresses.tolist(), [lengths] * len(starts), direction)


class MemcacheWriter(Writer):
    """See ``Writer``. The pieces of an object may come in any order, but each byte only once. LONGEST_WRITE_S after the begin,
    nothing is written any more: the writer is then taken for dead, and the room may soon be somebody else's."""

    def __init__(self, calls: Calls, directions: Directions, keys: Sequence[str], nbytes: int, deadline_s: float) -> None:
        self._calls, self._direction = calls, directions.put
        self._keys, self._nbytes = keys, nbytes
        self._begin_until = time.monotonic() + deadline_s
        self._until = time.monotonic() + half_written.LONGEST_WRITE_S
        self._starts: dict[int, int] = {}  # row -> global address, of what is ours
        self._written: dict[int, int] = {}  # row -> bytes; -1 after a failed copy
        self.results: list[Result] = []

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        length = check_pieces(rows, offset, addresses, sizes, self._nbytes)
        ours = [i for i, row in enumerate(rows) if row in self._starts]
        results = [Result(Status.FATAL, text="this writer has no such object")] * len(rows)
        if not ours:
            return results

        def work(client: Client) -> list[Result]:
            starts = [self._starts[rows[i]] + offset for i in ours]
            code = copy(client, starts, addresses[ours], sizes, self._direction)
            return [Result(Status.OK, length) if code == 0 else failed(code)] * len(ours)

        for i, result in zip(ours, self._calls(work, len(ours), self._until), strict=True):
            results[i] = result
            done = self._written[rows[i]]
            self._written[rows[i]] = done + length if result.status is Status.OK and done >= 0 else -1
        return results

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        chosen = set(range(len(self._keys)) if rows is None else rows)
        complete = [row for row in self._starts if row in chosen and self._written[row] == self._nbytes]
        others = [row for row in self._starts if row not in complete]
        results = [result if result.status is not Status.OK else _not_published(self._nbytes) for result in self.results]
        self._drop(others)
        if complete:
            outcome = self._calls(lambda client: self._publish(client, complete), len(complete), self._until)
            for row, result in zip(complete, outcome, strict=True):
                results[row] = result
            self._drop([row for row, result in zip(complete, outcome, strict=True) if not result.stored])
        return results

    def _publish(self, client: Client, rows: Sequence[int]) -> list[Result]:
        keys = [self._keys[row] for row in rows]
        codes = client.batch_write_finish(keys, [0] * len(keys))
        there = client.batch_is_exist(keys)
        results = [
            put_result(code, self._nbytes)
            if code != 0 or found == 1
            else Result(Status.TRANSIENT, text="it cannot be read after all")
            for code, found in zip(codes, there, strict=True)
        ]
        for row, code, result in zip(rows, codes, results, strict=True):
            if code == 0 or result.stored:
                del self._starts[row]  # the others were not published: they are still ours, to be dropped
        return results

    def abort(self) -> None:
        self._drop(list(self._starts))

    def _drop(self, rows: Sequence[int]) -> None:
        """Give the room back by removing the key. Telling the library that the write failed would leave the key blocked, and a
        later write of it could publish garbage."""
        keys = [self._keys[row] for row in rows if row in self._starts]
        for row in rows:
            self._starts.pop(row, None)
        if keys:
            self._calls(lambda client: _remove(client, keys), len(keys), time.monotonic() + CLEAN_UP_S)

    def begin(self) -> None:
        """Allocate. Only keys that nobody has or writes: of others the library gives the address of the living object."""
        self.results = self._calls(self._allocate, len(self._keys), self._begin_until)

    def _allocate(self, client: Client) -> list[Result]:
        results = [_begin_result(state) for state in key_states(client, self._keys)]
        free = [row for row, result in enumerate(results) if result.status is Status.OK]
        keys = [self._keys[row] for row in free]
        lease_ms = int(half_written.LONGEST_WRITE_S * 1000)
        starts = client.batch_alloc(keys, [self._nbytes] * len(keys), MEDIUM_DRAM, lease_ms) if keys else []
        for row, start, state in zip(free, starts, key_states(client, keys), strict=True):
            if state.readable:
                results[row] = Result(Status.EXISTS)  # somebody was faster: it is not ours to write
            elif start == 0 or start != state.start:
                results[row] = put_result(FAILED, 0)
            else:
                self._starts[row], self._written[row] = start, 0
        return results


def _remove(client: Client, keys: Sequence[str]) -> list[Result]:
    client.remove_batch(keys)
    return [Result(Status.OK)] * len(keys)


def _begin_result(state: KeyState) -> Result:
    """Whether a key can be written."""
    if state.code != 0:
        return failed(state.code)
    if state.readable:
        return Result(Status.EXISTS)
    if state.start:
        return Result(Status.BUSY, code=BEING_WRITTEN, text=text_of(BEING_WRITTEN))
    return Result(Status.OK)


def _not_published(nbytes: int) -> Result:
    return Result(Status.TRANSIENT, text=f"not committed, or not all of its {nbytes} bytes were written")


class MemcacheReader(Reader):
    """See ``Reader``. The library's lease does not keep an object from being removed: each read is followed by a look whether it is
    still there, and a read of one that is not is MISSING. After READ_LEASE_S reads fail."""

    def __init__(self, calls: Calls, directions: Directions, leases: Leases, keys: Sequence[str], deadline_s: float) -> None:
        self._calls, self._direction, self._leases = calls, directions.get, leases
        self._keys = keys
        self._begin_until = time.monotonic() + deadline_s
        self._until = time.monotonic() + READ_LEASE_S
        self._token: int | None = None
        self._starts: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self.results: list[Result] = []

    def begin(self) -> None:
        self.results = self._calls(self._open, len(self._keys), self._begin_until)

    def _open(self, client: Client) -> list[Result]:
        self._token, codes = self._leases.take(client, self._keys, READ_LEASE_S)
        results = [get_result(code, 0) for code in codes]
        leased = [row for row, code in enumerate(codes) if code == 0]
        for row, state in zip(leased, key_states(client, [self._keys[row] for row in leased]), strict=True):
            results[row] = Result(Status.OK, state.nbytes) if state.readable else Result(Status.MISSING, text="it went just now")
            if state.readable:
                self._starts[row], self._sizes[row] = state.start, state.nbytes
        return results

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        known = [i for i, row in enumerate(rows) if row in self._starts]
        length = check_pieces(rows, offset, addresses, sizes, min((self._sizes[rows[i]] for i in known), default=1 << 62))
        results = [Result(Status.MISSING, text="it was not there when the read began, or the read has ended")] * len(rows)
        if not known:
            return results

        def work(client: Client) -> list[Result]:
            chosen = [rows[i] for i in known]
            starts = [self._starts[row] for row in chosen]
            code = copy(client, [start + offset for start in starts], addresses[known], sizes, self._direction)
            now = key_states(client, [self._keys[row] for row in chosen])
            there = [state.readable and state.start == start for state, start in zip(now, starts, strict=True)]
            done = Result(Status.OK, length) if code == 0 else failed(code)
            return [done if still else Result(Status.MISSING, text="it was removed while it was read") for still in there]

        for i, result in zip(known, self._calls(work, len(known), self._until), strict=True):
            results[i] = result
        return results

    def end(self) -> None:
        token, self._token = self._token, None
        self._starts.clear()
        if token is not None:
            self._calls(lambda client: self._give(client, token), 0, time.monotonic() + CLEAN_UP_S)

    def _give(self, client: Client, token: int) -> list[Result]:
        self._leases.give(client, token)
        return []
