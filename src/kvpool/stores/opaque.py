"""What the stores have in common whose memory lies behind a library (Mooncake, MemCache, openYuanrong).

An adapter fills in the hooks below: short, blocking, in terms of the library. This class adds what the contract asks of all: calls
on native threads with deadlines, an answer for every key, splitting, duplicates, and the rule that a put counts only when the
object can be read afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.stores import checksums, opaque_notes
from kvpool.stores.base import (
    MISS,
    UNKNOWN,
    Answer,
    Batch,
    Done,
    Handle,
    Health,
    Hit,
    Lease,
    Reader,
    Result,
    Status,
    Store,
    StoreStats,
    Writer,
)
from kvpool.stores.native import Closed, NativeCalls, Transfer

logger = logging.getLogger(__name__)

FATAL_CLOSED = Result(Status.FATAL, text="the store is closed")
EXISTS = Result(Status.EXISTS)
BUSY = Result(Status.BUSY, text="it cannot be read: somebody is writing it, or died doing so, or it was evicted at once")
NO_ANSWER = Result(Status.TRANSIENT, text="the store could not say whether it is there")
DAMAGED = Result(Status.MISSING, text="the bytes do not match their checksum; the object is removed")


@dataclass(frozen=True, slots=True)
class Limits:
    """How a library is to be called. ``batch_*``: one put or get; ``exists_keys``: one lookup; seconds are deadlines of ours."""

    batch_keys: int = 256
    batch_bytes: int = 64 << 20
    exists_keys: int = 4096
    transfer_threads: int = 2
    lookup_threads: int = 2
    lookup_s: float = 2.0
    close_s: float = 5.0


class OpaqueStore(Store):
    """A store behind a library. Hooks run on native threads, several at once; they may raise, and ``_fault`` says what it means."""

    limits = Limits()
    checksums = False  # whether every object ends with a trailer (checksums.py); an adapter sets it before open

    def __init__(self) -> None:
        self._life = threading.Lock()
        self.damaged_objects = 0  # found by this process
        self._transfers: NativeCalls | None = None
        self._lookups: NativeCalls | None = None

    # hooks of the adapter

    @abstractmethod
    def _connect(self) -> None:
        """Import the library and reach the service, within a deadline; OSError or ValueError with the reason in one line."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the library; no other call runs now, and none will come."""

    @abstractmethod
    def _exists(self, keys: Sequence[bytes]) -> list[Answer]:
        """At most ``limits.exists_keys`` keys. A Hit of 0 bytes where the library does not tell lengths."""

    @abstractmethod
    def _put(self, batch: Batch) -> list[Result]:
        """Distinct keys that were not there a moment ago, within the batch limits. OK: to be confirmed by a lookup."""

    @abstractmethod
    def _get(self, batch: Batch) -> list[Result]:
        """Distinct keys within the batch limits."""

    @abstractmethod
    def _remove(self, keys: Sequence[bytes]) -> list[Result]: ...

    @abstractmethod
    def _stats(self) -> StoreStats: ...

    @abstractmethod
    def _health(self) -> Health: ...

    def _lease_s(self) -> float:
        """Seconds for which a lookup protects what it finds; 0 where it does not."""
        return 0.0

    def _takes_host_memory(self) -> bool:
        """Whether put and get take any memory of this process: unregistered, and beside the device's."""
        return not self.capabilities.device_memory

    def _fault(self, error: BaseException) -> Result:
        """What an exception of a hook means for the keys of its call."""
        if isinstance(error, Closed):
            return FATAL_CLOSED
        return Result(Status.TRANSIENT, text=f"{type(error).__name__}: {error}"[:500])

    # life

    def open(self) -> None:
        with self._life:
            if self._transfers is not None:
                return
            self._connect()
            self._lookups = NativeCalls(f"{self.name}-lookup", self.limits.lookup_threads)
            self._transfers = NativeCalls(f"{self.name}-transfer", self.limits.transfer_threads)

    def close(self) -> None:
        """A library that still runs a call when the time is over is left open: closing it under the call could end the process."""
        with self._life:
            transfers, lookups = self._transfers, self._lookups
            self._transfers = self._lookups = None
            if transfers is None or lookups is None:
                return
            end = time.monotonic() + self.limits.close_s
            quiet = [calls.close(end - time.monotonic()) for calls in (transfers, lookups)]
            if all(quiet):
                self._disconnect()

    # lookups

    def exists(self, keys: Sequence[bytes]) -> list[Answer]:
        lookups = self._lookups
        if lookups is None or not keys:
            return [UNKNOWN] * len(keys)
        try:
            return lookups.ask(lambda: self._look(keys), self.limits.lookup_s)
        except Exception:  # noqa: BLE001 - what a lookup cannot tell is UNKNOWN, whatever the library did
            return [UNKNOWN] * len(keys)

    def _look(self, keys: Sequence[bytes]) -> list[Answer]:
        """Answers for all keys; those that no object can have are not asked for."""
        asked = [row for row, key in enumerate(keys) if self._possible(key)]
        found: list[Answer] = [MISS] * len(keys)
        for first in range(0, len(asked), self.limits.exists_keys):
            rows = asked[first : first + self.limits.exists_keys]
            answers = self._exists([keys[row] for row in rows])
            if len(answers) != len(rows):
                raise OSError(f"{len(answers)} answers for {len(rows)} keys")
            for row, answer in zip(rows, answers, strict=True):
                found[row] = self._without_trailer(answer)
        return found

    def _possible(self, key: bytes) -> bool:
        return 0 < len(key) <= self.capabilities.max_key_len

    def _without_trailer(self, answer: Answer) -> Answer:
        if not self.checksums or not isinstance(answer, Hit):
            return answer
        return Hit(answer.tier, max(answer.nbytes - checksums.TRAILER, 0))

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        """The library's own lease, which every lookup renews; ``until`` tells how long it lasts."""
        asked = time.monotonic()
        return Lease(keys, self.exists(keys), asked + min(seconds, self._lease_s()))

    def release(self, lease: Lease) -> None:
        """The libraries have no call for it: their leases run out."""

    # transfers

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        self._check(batch)
        return self._begin(batch, deadline_s, self._store)

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        return self._begin(batch, deadline_s, self._fetch)

    def _begin(self, batch: Batch, deadline_s: float, work: Callable[[Batch], list[Result]]) -> Handle:
        transfers, until = self._transfers, time.monotonic() + deadline_s
        if transfers is None:
            return Done([FATAL_CLOSED] * len(batch.keys))
        if not batch.keys:
            return Done([])
        call = transfers.begin(lambda: self._in_parts(batch, until, work), deadline_s)
        return Transfer(call, len(batch.keys), self._fault)

    def _check(self, batch: Batch) -> None:
        """ValueError for objects that cannot be stored."""
        impossible = next((key for key in batch.keys if not self._possible(key)), None)
        if impossible is not None:
            raise ValueError(f"a key of {len(impossible)} bytes (accepted: 1 to {self.capabilities.max_key_len})")
        if batch.keys and (batch.object_nbytes <= 0 or bool((batch.sizes < 0).any())):
            raise ValueError(f"objects of {batch.object_nbytes} bytes cannot be stored, in segments of {batch.sizes.tolist()[:8]}")

    def _in_parts(self, batch: Batch, until: float, work: Callable[[Batch], list[Result]]) -> list[Result]:
        """``work`` on pieces that the library takes; what does not begin before ``until`` is TRANSIENT."""
        step = max(1, min(self.limits.batch_keys, self.limits.batch_bytes // max(batch.object_nbytes, 1)))
        results: list[Result] = []
        for first in range(0, len(batch.keys), step):
            part = Batch(batch.keys[first : first + step], batch.addresses[first : first + step], batch.sizes)
            if time.monotonic() > until:
                results += [Result(Status.TRANSIENT, text="deadline")] * len(part.keys)
                continue
            try:
                results += work(part)
            except Exception as error:  # noqa: BLE001 - these keys failed, the others need not
                results += [self._fault(error)] * len(part.keys)
        return results

    def _store(self, batch: Batch, there: Sequence[Answer] | None = None) -> list[Result]:
        """Put what is not there yet, then look: only what can be read now has been stored. ``there``: what a look has just said."""
        results: list[Result] = [EXISTS] * len(batch.keys)
        first_of = {key: row for row, key in reversed(list(enumerate(batch.keys)))}
        there = self._look(batch.keys) if there is None else there
        rows = []
        for row, key in enumerate(batch.keys):
            if first_of[key] == row and there[row] is UNKNOWN:
                results[row] = NO_ANSWER
            elif first_of[key] == row and not isinstance(there[row], Hit):
                rows.append(row)
        written = self._put_sealed(take(batch, rows)) if rows else []
        ok = [row for row, result in zip(rows, written, strict=True) if result.status is Status.OK]
        sure = self._look([batch.keys[row] for row in ok]) if ok else []
        for row, result in zip(rows, written, strict=True):
            results[row] = result
        for row, answer in zip(ok, sure, strict=True):
            if not isinstance(answer, Hit):
                results[row] = NO_ANSWER if answer is UNKNOWN else BUSY
        for row, key in enumerate(batch.keys):
            if first_of[key] != row and not results[first_of[key]].stored:
                results[row] = results[first_of[key]]
        return results

    def _put_sealed(self, batch: Batch) -> list[Result]:
        if not self.checksums:
            return self._put(batch)
        wider, _trailers = checksums.sealed(batch)
        return [_of_length(result, batch) for result in self._put(wider)]

    def _fetch(self, batch: Batch) -> list[Result]:
        rows = [row for row, key in enumerate(batch.keys) if self._possible(key)]
        if len(rows) == len(batch.keys):
            return self._get_checked(batch)
        results = [Result(Status.MISSING)] * len(batch.keys)
        for row, result in zip(rows, self._get_checked(take(batch, rows)) if rows else [], strict=True):
            results[row] = result
        return results

    def _get_checked(self, batch: Batch) -> list[Result]:
        """What does not match its checksum is missing, and removed."""
        if not self.checksums:
            return self._get(batch)
        wider, trailers = checksums.with_room(batch)
        results = [_of_length(result, batch) for result in self._get(wider)]
        ok = [row for row, result in enumerate(results) if result.status is Status.OK]
        bad = checksums.damaged(batch, trailers, ok)
        for row in bad:
            results[row] = DAMAGED
        if bad:
            self._quarantine([batch.keys[row] for row in bad])
        return results

    def _quarantine(self, keys: Sequence[bytes]) -> None:
        """On a native thread: take objects away whose bytes have changed."""
        self.damaged_objects += len(keys)
        logger.warning(
            "kvpool: %d objects of %s do not match their checksum and are removed, %r first", len(keys), self.name, keys[0]
        )
        try:
            self._remove(keys)
        except Exception:
            logger.warning("kvpool: they could not be removed", exc_info=True)

    # the rest

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        raise NotImplementedError(f"{self.name} cannot write in pieces")

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        raise NotImplementedError(f"{self.name} cannot read in pieces")

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        transfers = self._transfers
        if transfers is None:
            return [FATAL_CLOSED] * len(keys)
        if not keys:
            return []
        results = [Result(Status.MISSING)] * len(keys)
        rows = [row for row, key in enumerate(keys) if self._possible(key)]
        possible = [keys[row] for row in rows]
        try:
            removed = transfers.ask(lambda: self._remove(possible), self.limits.close_s) if rows else []
        except Exception as error:  # noqa: BLE001 - an answer for every key
            removed = [self._fault(error)] * len(rows)
        for row, result in zip(rows, removed, strict=True):
            results[row] = result
        return results

    def write_note(self, name: bytes, text: str) -> None:
        if self._takes_host_memory():
            opaque_notes.write(self, name, text)

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        return opaque_notes.read(self, prefix) if self._takes_host_memory() else {}

    def stats(self) -> StoreStats:
        lookups = self._lookups
        if lookups is None:
            return StoreStats()
        try:
            return lookups.ask(self._stats, self.limits.lookup_s)
        except Exception:  # noqa: BLE001 - a gauge that cannot be read is empty
            return StoreStats()

    def health(self) -> Health:
        lookups = self._lookups
        if lookups is None:
            return Health(False, "the store is closed")
        try:
            return lookups.ask(self._health, self.limits.lookup_s)
        except Exception as error:  # noqa: BLE001 - not well, whatever the reason
            return Health(False, f"{type(error).__name__}: {error}"[:200])


def _of_length(result: Result, batch: Batch) -> Result:
    """An OK result without the trailer's bytes."""
    return result._replace(nbytes=batch.object_nbytes) if result.status is Status.OK else result


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some objects of a batch."""
    chosen = np.array(rows, dtype=np.int64)
    return Batch([batch.keys[row] for row in rows], batch.addresses[chosen], batch.sizes)
