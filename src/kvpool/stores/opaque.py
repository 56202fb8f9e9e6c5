"""What the stores have in common whose memory lies behind a library (Mooncake, MemCache, openYuanrong).

An adapter fills in the hooks below: short, blocking, in terms of the library. This class adds what the contract asks of all: calls
on native threads with deadlines, an answer for every key, splitting, duplicates, and the rule that a put counts only when the
object can be read afterwards.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.stores import opaque_notes
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
    Result,
    Status,
    Store,
    StoreStats,
)
from kvpool.stores.native import Closed, NativeCalls, Transfer

FATAL_CLOSED = Result(Status.FATAL, text="the store is closed")
EXISTS = Result(Status.EXISTS)
BUSY = Result(Status.BUSY, text="somebody is writing it, or died doing so")
MISSING = Result(Status.MISSING)


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

    def __init__(self) -> None:
        self._life = threading.Lock()
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
        if not self._possible(keys):
            sound = [key for key in keys if self._possible([key])]
            told = iter(self._look(sound))
            return [next(told) if self._possible([key]) else MISS for key in keys]
        found: list[Answer] = []
        for first in range(0, len(keys), self.limits.exists_keys):
            part = keys[first : first + self.limits.exists_keys]
            answers = self._exists(part)
            if len(answers) != len(part):
                raise OSError(f"{len(answers)} answers for {len(part)} keys")
            found += answers
        return found

    def _possible(self, keys: Sequence[bytes]) -> bool:
        """Whether objects can have these keys."""
        return not keys or (min(map(len, keys)) > 0 and max(map(len, keys)) <= self.capabilities.max_key_len)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        """The library's own lease, which every lookup renews; ``until`` tells how long it lasts."""
        asked = time.monotonic()
        return Lease(keys, self.exists(keys), asked + min(seconds, self._lease_s()))

    def release(self, lease: Lease) -> None:
        """The libraries have no call for it: their leases run out."""

    # transfers

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        return self._begin(batch, deadline_s, self._store)

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        return self._begin(batch, deadline_s, self._fetch)

    def _begin(self, batch: Batch, deadline_s: float, work: Callable[[Batch], list[Result]]) -> Handle:
        transfers, until = self._transfers, time.monotonic() + deadline_s
        if not batch.keys:
            return Done([])
        self._check(batch)
        if transfers is None:
            return Done([FATAL_CLOSED] * len(batch.keys))
        call = transfers.begin(lambda: self._in_parts(batch, until, work), deadline_s)
        return Transfer(call, len(batch.keys), self._fault)

    def _check(self, batch: Batch) -> None:
        """ValueError for an object that cannot be."""
        if batch.object_nbytes <= 0 or bool((batch.sizes < 0).any()):
            raise ValueError(f"an object must have at least one byte, segments none below 0: sizes are {batch.sizes.tolist()[:8]}")
        if not self._possible(batch.keys):
            raise ValueError(f"keys have 1 to {self.capabilities.max_key_len} bytes")

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

    def _store(self, batch: Batch) -> list[Result]:
        """Put what is not there yet, then look: only what can be read now has been stored."""
        results: list[Result] = [EXISTS] * len(batch.keys)
        first_of = {key: row for row, key in reversed(list(enumerate(batch.keys)))}
        there = self._look(batch.keys)
        rows = [row for row, key in enumerate(batch.keys) if first_of[key] == row and not isinstance(there[row], Hit)]
        written = self._put(take(batch, rows)) if rows else []
        ok = [row for row, result in zip(rows, written, strict=True) if result.status is Status.OK]
        sure = self._look([batch.keys[row] for row in ok]) if ok else []
        for row, result in zip(rows, written, strict=True):
            results[row] = result
        for row, answer in zip(ok, sure, strict=True):
            if not isinstance(answer, Hit):
                results[row] = BUSY
        for row, key in enumerate(batch.keys):
            if first_of[key] != row and not results[first_of[key]].stored:
                results[row] = results[first_of[key]]
        return results

    def _fetch(self, batch: Batch) -> list[Result]:
        return self._get(batch)

    # the rest

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        transfers = self._transfers
        if transfers is None:
            return [FATAL_CLOSED] * len(keys)
        if not keys:
            return []
        if not self._possible(keys):
            return [self.remove([key])[0] if self._possible([key]) else MISSING for key in keys]
        try:
            return transfers.ask(lambda: self._remove(keys), self.limits.close_s)
        except Exception as error:  # noqa: BLE001 - an answer for every key
            return [self._fault(error)] * len(keys)

    def write_note(self, name: bytes, text: str) -> None:
        opaque_notes.write(self, name, text)

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        return opaque_notes.read(self, prefix)

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


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some objects of a batch."""
    chosen = np.array(rows, dtype=np.int64)
    return Batch([batch.keys[row] for row in rows], batch.addresses[chosen], batch.sizes)
