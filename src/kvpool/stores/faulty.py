"""Any store, misbehaving on command (faults.py has the plan): for tests of everything that stands on a store."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np

from kvpool.stores.base import (
    MISS,
    UNKNOWN,
    Addresses,
    Answer,
    Batch,
    Capabilities,
    Done,
    Handle,
    Health,
    Lease,
    MappedStore,
    Pins,
    Reader,
    Result,
    Slot,
    Status,
    Store,
    StoreStats,
    Writer,
)
from kvpool.stores.faults import Fault, FaultPlan

T = TypeVar("T")

_TICK_S = 0.01


class FaultyStore(MappedStore):
    """``inner`` with the faults of ``plan``; with an empty plan it is ``inner``. Mapped calls need a mapped ``inner``."""

    def __init__(self, inner: Store, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.name = f"faulty({inner.name})"
        self._closed = threading.Event()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        said = self.plan.abandonable
        known = self.inner.capabilities
        return known if said is None else dataclasses.replace(known, abandonable=said)

    def begin(self, kind: str) -> Fault:
        """Delay, hang or raise as the plan says for a call of this kind that begins now."""
        fault = self.plan.begin(kind)
        if fault.delay_s:
            self._closed.wait(fault.delay_s)
        if fault.hang:
            while self.plan.now(kind).hang and not self._closed.wait(_TICK_S):
                pass
        if fault.error:
            raise RuntimeError(fault.error)
        return fault

    def chosen(self, fault: Fault, keys: Sequence[bytes]) -> set[int]:
        return set(fault.chosen(keys, self.plan.chance))

    def through(self, kind: str, keys: Sequence[bytes], call: Callable[[list[int]], list[Result]], lost: Result) -> list[Result]:
        """Run a call with one result per key: ``call`` gets the places of the keys that the inner store may see."""
        return self.sieve(self.begin(kind), keys, call, lost)

    def sieve(self, fault: Fault, keys: Sequence[bytes], call: Callable[[list[int]], list[Result]], lost: Result) -> list[Result]:
        hit = self.chosen(fault, keys)
        answer = lost if fault.lose else fault.refusal
        passed = [row for row in range(len(keys)) if answer is None or row not in hit]
        results = [answer or lost] * len(keys)
        for row, result in zip(passed, call(passed) if passed else [], strict=True):
            results[row] = result
        return _resized(results, fault, Result(Status.OK))

    # life

    def open(self) -> None:
        self._closed.clear()
        self.begin("open")
        self.inner.open()

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        self.inner.register(regions)

    # lookups

    def exists(self, keys: Sequence[bytes]) -> list[Answer]:
        fault = self.begin("exists")
        return self._answers(fault, keys, self.inner.exists(keys))

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        fault = self.begin("lease")
        lease = self.inner.lease(keys, seconds)
        lease.answers = self._answers(fault, keys, lease.answers)
        return lease

    def _answers(self, fault: Fault, keys: Sequence[bytes], answers: list[Answer]) -> list[Answer]:
        hit = self.chosen(fault, keys)
        if fault.unknown or fault.status in (Status.TRANSIENT, Status.FATAL):
            answers = [UNKNOWN if row in hit else answer for row, answer in enumerate(answers)]
        elif fault.status is Status.MISSING:
            answers = [MISS if row in hit else answer for row, answer in enumerate(answers)]
        return _resized(answers, fault, MISS)

    def release(self, lease: Lease) -> None:
        self.begin("release")
        self.inner.release(lease)

    # whole objects

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        fault = self.begin("put")
        stored = Result(Status.OK, batch.object_nbytes)

        def run(left_s: float) -> list[Result]:
            return self.sieve(fault, batch.keys, lambda rows: _wait(self.inner.put(_rows(batch, rows), left_s), left_s), stored)

        return self._handle(fault, run, deadline_s)

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        fault = self.begin("get")

        def run(left_s: float) -> list[Result]:
            def call(rows: list[int]) -> list[Result]:
                return _wait(self.inner.get(_rows(batch, rows), left_s), left_s)

            results = self.sieve(fault, batch.keys, call, Result(Status.MISSING))
            if fault.corrupt:
                _flip(batch.addresses[sorted(self.chosen(fault, batch.keys))], batch.sizes)
            return results

        return self._handle(fault, run, deadline_s)

    def _handle(self, fault: Fault, run: Callable[[float], list[Result]], deadline_s: float) -> Handle:
        if fault.late_s is None:
            return Done(run(deadline_s))
        return LateHandle(run, deadline_s + fault.late_s)

    # objects in pieces

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        fault = self.begin("begin_write")
        return FaultyWriter(self, fault, keys, nbytes, deadline_s)

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        fault = self.begin("begin_read")
        return FaultyReader(self, fault, keys, deadline_s)

    # slots in place

    @property
    def _mapped(self) -> MappedStore:
        return cast(MappedStore, self.inner)

    def reserve(self, count: int, nbytes: int, deadline_s: float) -> list[Slot]:
        fault = self.begin("reserve")
        return [] if fault.refusal is not None else self._mapped.reserve(count, nbytes, deadline_s)

    def publish(self, pairs: Sequence[tuple[Slot, bytes]], deadline_s: float) -> list[Result]:
        fault = self.begin("publish")
        keys = [key for _, key in pairs]
        if fault.lose:
            self._mapped.discard([pairs[row][0] for row in self.chosen(fault, keys)])
        return self.sieve(
            fault, keys, lambda rows: self._mapped.publish([pairs[row] for row in rows], deadline_s), Result(Status.OK)
        )

    def discard(self, slots: Sequence[Slot]) -> None:
        self.begin("discard")
        self._mapped.discard(slots)

    def pin(self, keys: Sequence[bytes]) -> Pins:
        fault = self.begin("pin")
        return Pins([0] * len(keys), [0] * len(keys)) if fault.refusal is not None else self._mapped.pin(keys)

    def unpin(self, pins: Pins) -> None:
        self.begin("unpin")
        self._mapped.unpin(pins)

    # upkeep

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        return self.through("remove", keys, lambda rows: self.inner.remove([keys[row] for row in rows]), Result(Status.OK))

    def list(self, prefix: bytes = b"") -> list[bytes]:
        self.begin("list")
        return self.inner.list(prefix)

    def clear(self, prefix: bytes) -> int:
        self.begin("clear")
        return self.inner.clear(prefix)

    def write_note(self, name: bytes, text: str) -> None:
        self.begin("write_note")
        self.inner.write_note(name, text)

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        self.begin("notes")
        return self.inner.notes(prefix)

    def stats(self) -> StoreStats:
        self.begin("stats")
        return self.inner.stats()

    def health(self) -> Health:
        fault = self.begin("health")
        return Health(False, "injected") if fault.refusal is not None else self.inner.health()


class FaultyWriter(Writer):
    """Faults of kind begin_write decide which objects may be written, those of write and commit what becomes of them."""

    def __init__(self, store: FaultyStore, fault: Fault, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> None:
        self._store = store
        self._keys = keys
        hit = store.chosen(fault, keys) if fault.refusal is not None else set()
        self._rows = [row for row in range(len(keys)) if row not in hit]
        self._place = {row: place for place, row in enumerate(self._rows)}
        self._inner = store.inner.begin_write([keys[row] for row in self._rows], nbytes, deadline_s)
        self.results = [fault.refusal or Result(Status.OK)] * len(keys)
        for row, result in zip(self._rows, self._inner.results, strict=True):
            self.results[row] = result
        self.results = _resized(self.results, fault, Result(Status.OK))

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        def call(passed: list[int]) -> list[Result]:
            known = [place for place in passed if rows[place] in self._place]
            results = [Result(Status.FATAL, text="never begun")] * len(passed)
            outcome = self._inner.write([self._place[rows[place]] for place in known], offset, addresses[known], sizes)
            for place, result in zip(known, outcome, strict=True):
                results[passed.index(place)] = result
            return results

        written = Result(Status.OK, int(sizes.sum()))
        return self._store.through("write", [self._keys[row] for row in rows], call, written)

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        fault = self._store.begin("commit")
        hit = self._store.chosen(fault, self._keys) if fault.lose or fault.refusal is not None else set()
        wanted = set(range(len(self._keys)) if rows is None else rows)
        outcome = self._inner.commit([self._place[row] for row in self._rows if row in wanted and row not in hit])
        answer = Result(Status.OK) if fault.lose else fault.refusal
        results = list(self.results[: len(self._keys)])
        for row, result in zip(self._rows, outcome, strict=True):
            results[row] = answer if row in hit and answer is not None else result
        return _resized(results, fault, Result(Status.OK))

    def abort(self) -> None:
        self._store.begin("abort")
        self._inner.abort()


class FaultyReader(Reader):
    def __init__(self, store: FaultyStore, fault: Fault, keys: Sequence[bytes], deadline_s: float) -> None:
        self._store = store
        self._keys = keys
        self._inner = store.inner.begin_read(keys, deadline_s)
        hit = store.chosen(fault, keys)
        refusal = fault.refusal
        self.results = [refusal if refusal and row in hit else result for row, result in enumerate(self._inner.results)]
        self.results = _resized(self.results, fault, Result(Status.OK))

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        fault = self._store.begin("read")
        keys = [self._keys[row] for row in rows]

        def call(passed: list[int]) -> list[Result]:
            return self._inner.read([rows[place] for place in passed], offset, addresses[passed], sizes)

        results = self._store.sieve(fault, keys, call, Result(Status.MISSING))
        if fault.corrupt:
            _flip(addresses[sorted(self._store.chosen(fault, keys))], sizes)
        return results

    def end(self) -> None:
        self._store.begin("end")
        self._inner.end()


class LateHandle:
    """A call that nothing can stop: it reads or writes the caller's memory ``delay_s`` from now."""

    def __init__(self, run: Callable[[float], list[Result]], delay_s: float) -> None:
        self._finished = threading.Event()
        self._outcome: list[Result] | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(run, delay_s), name="kvpool-late-call", daemon=True).start()

    def _run(self, run: Callable[[float], list[Result]], delay_s: float) -> None:
        time.sleep(delay_s)
        try:
            self._outcome = run(30.0)
        except Exception as error:  # noqa: BLE001 - raised by results()
            self._error = error
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def results(self) -> list[Result]:
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise ValueError("the call is not done")
        return self._outcome

    def abandon(self) -> bool:
        return self._finished.is_set()


def _resized(answers: list[T], fault: Fault, filler: T) -> list[T]:
    if fault.result_change < 0:
        return answers[: fault.result_change]
    return answers + [filler] * fault.result_change


def _rows(batch: Batch, rows: list[int]) -> Batch:
    if len(rows) == len(batch.keys):
        return batch
    return Batch([batch.keys[row] for row in rows], batch.addresses[np.array(rows, dtype=np.int64)], batch.sizes)


def _wait(handle: Handle, seconds: float) -> list[Result]:
    while not handle.wait(max(seconds, 1.0)):
        pass
    return handle.results()


def _flip(addresses: Addresses, sizes: Addresses) -> None:
    """Flip the lowest bit of every byte: floats of any width stay finite, some 4 times as large or small."""
    for row in addresses.tolist():
        for address, nbytes in zip(row, sizes.tolist(), strict=True):
            if nbytes:
                np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))[:] ^= 1
