"""A store in a dictionary that does as it is told: wait at a gate, hold a transfer, fail, raise, lose, fill up, write late."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvpool.stores.base import (
    EVICTED,
    MISS,
    UNKNOWN,
    Answer,
    Batch,
    Capabilities,
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
    Tier,
    Writer,
)

GONE = Result(Status.MISSING)
Rule = Callable[[bytes], "Result | None"]


class Held:
    """A transfer that moves its bytes only when the test says so, like a library that works in the background."""

    def __init__(self, move: Callable[[], list[Result]], abandonable: bool) -> None:
        self._move = move
        self._abandonable = abandonable
        self._ended = threading.Event()
        self._outcome: list[Result] = []
        self.abandoned = False

    def finish(self) -> None:
        if not self.abandoned:
            self._outcome = self._move()
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(max(0.0, timeout_s))

    def results(self) -> list[Result]:
        if not self.done():
            raise ValueError("not done")
        return self._outcome

    def abandon(self) -> bool:
        self.abandoned = self.abandoned or (self._abandonable and not self.done())
        return self.abandoned or self.done()


class FakeStore(Store):
    """Objects are ``objects[key]``. ``gates[op]`` blocks calls until set; ``hold`` names ops whose transfers wait for ``finish``.

    ``rules[op]`` may give a result per key; ``hooks[op]`` runs at the start of each call and may raise. Ops: exists, lease,
    get, put, health.
    """

    name = "fake"

    def __init__(self, *, abandonable: bool = True, leases: bool = True, listable: bool = True, capacity: int = 1 << 30) -> None:
        self.capabilities = Capabilities(listable=listable, abandonable=abandonable, leases=leases)
        self.objects: dict[bytes, bytes] = {}
        self.gates: dict[str, threading.Event] = {}
        self.hold: set[str] = set()
        self.held: list[Held] = []
        self.rules: dict[str, Rule] = {}
        self.hooks: dict[str, Callable[[Sequence[bytes]], None]] = {}
        self.calls: Counter[str] = Counter()
        self.asked: dict[str, list[bytes]] = {op: [] for op in ("exists", "lease", "get", "put")}
        self.capacity = capacity
        self.gone: set[bytes] = set()  # what ``evict`` took, as a store with a memory of it would say
        self.tier_of: Callable[[bytes], Tier] = lambda key: Tier.DRAM
        self.leased: dict[int, tuple[frozenset[bytes], float]] = {}
        self.lease_faults: list[str] = []
        self.log = True
        self.opened = 0
        self._ids = itertools.count()
        self._lock = threading.RLock()

    # ---- what tests do ------------------------------------------------------------------------------------------------------

    def close_gate(self, op: str) -> threading.Event:
        self.gates[op] = threading.Event()
        return self.gates[op]

    def finish_held(self) -> int:
        """Let every held transfer happen now; how many."""
        with self._lock:
            held, self.held = self.held, []
        for one in held:
            one.finish()
        return len(held)

    def fail_keys(self, op: str, chosen: Callable[[bytes], bool], result: Result = GONE) -> None:
        self.rules[op] = lambda key: result if chosen(key) else None

    def evict(self, keys: Sequence[bytes]) -> int:
        """As a full store would: never what is leased. How many went."""
        with self._lock:
            safe = {key for keys, until in self.leased.values() if until > time.monotonic() for key in keys}
            gone = [key for key in keys if key in self.objects and key not in safe]
            for key in gone:
                del self.objects[key]
            self.gone.update(gone)
        return len(gone)

    # ---- the contract -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.opened -= 1

    def _enter(self, op: str, keys: Sequence[bytes] = ()) -> None:
        self.calls[op] += 1
        if self.log and op in self.asked:
            self.asked[op] += keys
        if op in self.hooks:
            self.hooks[op](keys)
        gate = self.gates.get(op)
        if gate is not None:
            gate.wait(60)

    def _answer(self, op: str, key: bytes) -> Answer:
        result = self.rules[op](key) if op in self.rules else None
        if result is not None:
            return {Status.OK: Hit(Tier.DRAM, 0), Status.MISSING: MISS}.get(result.status, UNKNOWN)
        stored = self.objects.get(key)
        if stored is None:
            return EVICTED if key in self.gone else MISS
        return Hit(self.tier_of(key), len(stored))

    def exists(self, keys: Sequence[bytes]) -> list[Answer]:
        self._enter("exists", keys)
        return [self._answer("exists", key) for key in keys]

    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        self._enter("lease", keys)
        with self._lock:
            answers = [self._answer("lease", key) for key in keys]
            token, until = next(self._ids), time.monotonic() + seconds
            self.leased[token] = (frozenset(k for k, a in zip(keys, answers, strict=True) if isinstance(a, Hit)), until)
        return Lease(list(keys), answers, until, token)

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self.leased.pop(lease.token, None) is None:
                self.lease_faults.append(f"lease {lease.token} released twice")

    def put(self, batch: Batch, deadline_s: float) -> Handle:
        if len(set(batch.keys)) != len(batch.keys):
            raise ValueError("a key twice in one batch")
        self._enter("put", batch.keys)
        return self._transfer("put", lambda: [self._put(batch, row) for row in range(len(batch.keys))])

    def get(self, batch: Batch, deadline_s: float) -> Handle:
        self._enter("get", batch.keys)
        return self._transfer("get", lambda: [self._get(batch, row) for row in range(len(batch.keys))])

    def _transfer(self, op: str, move: Callable[[], list[Result]]) -> Handle:
        if op not in self.hold:
            return Done(move())
        held = Held(move, self.capabilities.abandonable)
        with self._lock:
            self.held.append(held)
        return held

    def _put(self, batch: Batch, row: int) -> Result:
        key = bytes(batch.keys[row])
        ruled = self.rules["put"](key) if "put" in self.rules else None
        if ruled is not None and not ruled.stored:
            return ruled
        data = b"".join(ctypes.string_at(int(a), int(n)) for a, n in zip(batch.addresses[row], batch.sizes, strict=True))
        with self._lock:
            if key in self.objects:
                return Result(Status.EXISTS)
            if sum(map(len, self.objects.values())) + len(data) > self.capacity:
                return Result(Status.NO_SPACE)
            self.objects[key] = data
        return Result(Status.OK, len(data), tier=Tier.DRAM)

    def _get(self, batch: Batch, row: int) -> Result:
        key = bytes(batch.keys[row])
        ruled = self.rules["get"](key) if "get" in self.rules else None
        if ruled is not None and ruled.status is not Status.OK:
            return ruled
        data = self.objects.get(key)
        if data is None:
            return Result(Status.MISSING, code=-704)
        offset = 0
        for address, nbytes in zip(batch.addresses[row], batch.sizes, strict=True):
            ctypes.memmove(int(address), data[offset : offset + int(nbytes)], int(nbytes))
            offset += int(nbytes)
        return ruled or Result(Status.OK, offset, tier=self.tier_of(key))

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        raise NotImplementedError

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        return [Result(Status.OK if self.objects.pop(key, None) is not None else Status.MISSING) for key in keys]

    def list(self, prefix: bytes = b"") -> list[bytes]:
        return [key for key in list(self.objects) if key.startswith(prefix)]

    def clear(self, prefix: bytes) -> int:
        return sum(self.objects.pop(key, None) is not None for key in self.list(prefix))

    def stats(self) -> StoreStats:
        return StoreStats(self.capacity, sum(map(len, self.objects.values())), len(self.objects), leases=len(self.leased))

    def health(self) -> Health:
        self._enter("health")
        return Health(True)
