"""The engines behind a proxy, with their live load: who is ready, and who gets the next request. No I/O."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from types import TracebackType

from kvpool.proxy.addresses import Address
from kvpool.proxy.prefill_listeners import PrefillListeners


class Side(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    WAITING = "waiting"  # has not answered yet
    READY = "ready"
    DOWN = "down"  # did answer, does not now
    DRAINING = "draining"  # finishes what it has, then leaves


class NoInstanceError(Exception):
    """No instance of a side is ready."""

    def __init__(self, side: Side) -> None:
        super().__init__(f"no {side} instance is ready")
        self.side = side


class Instance:
    """One engine. ``active``: tokens it works on; ``held``: tokens whose KV it keeps until the other side has it."""

    def __init__(self, side: Side, address: Address, leave_by: float | None = None) -> None:
        self.side = side
        self.address = address
        self.state = State.WAITING
        self.active = 0
        self.held = 0
        self.requests = 0
        self.failures = 0  # in a row
        self.starts = 0  # times that it has become ready
        self.listeners = PrefillListeners()
        self.used = 0  # number of the last claim on the table: of equals the one that waited longest goes first
        self.leave_by = leave_by  # when a new one that never answers, or one that drains, is given up

    @property
    def score(self) -> int:
        """Held KV counts for three tenths: it takes room, but no time."""
        return 10 * self.active + 3 * self.held

    @property
    def idle(self) -> bool:
        return self.requests == 0


class Claim:
    """One request's share of an instance's load; given back exactly once, by ``release`` or at the end of its ``with`` block."""

    def __init__(self, table: Table, instance: Instance, tokens: int) -> None:
        self._table = table
        self.instance = instance
        self._active, self._held, self._open = tokens, 0, True
        instance.active += tokens
        instance.requests += 1

    def grow(self, tokens: int) -> None:
        """So many tokens more (or less), as they are known."""
        if self._open:
            self._active += tokens
            self.instance.active += tokens

    def hold(self) -> None:
        """The work is done, its KV is still there."""
        if self._open:
            self.instance.active -= self._active
            self.instance.held += self._active
            self._active, self._held = 0, self._held + self._active

    def release(self) -> None:
        if self._open:
            self._open = False
            self.instance.active -= self._active
            self.instance.held -= self._held
            self.instance.requests -= 1
            self._table.released(self.instance)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Table:
    """``down_after``: failures in a row that make an instance DOWN. ``slack``: tokens by which an instance that a prefix prefers
    may be busier than the least loaded one."""

    def __init__(self, down_after: int = 2, slack: int = 16384, clock: Callable[[], float] = time.monotonic) -> None:
        self._down_after, self._slack, self._clock = down_after, slack, clock
        self._instances: dict[tuple[Side, Address], Instance] = {}
        self._claims = 0

    def instances(self, side: Side | None = None) -> list[Instance]:
        return [one for one in self._instances.values() if side in (None, one.side)]

    def ready(self, side: Side, without: Collection[Address] = ()) -> list[Instance]:
        return [one for one in self.instances(side) if one.state is State.READY and one.address not in without]

    def add(self, side: Side, address: Address, give_up_s: float | None = None) -> bool:
        """False where it is there already; one that drains stays then. ``give_up_s``: how long to wait for its first answer."""
        leave_by = None if give_up_s is None else self._clock() + give_up_s
        known = self._instances.get((side, address))
        if known is None:
            self._instances[side, address] = Instance(side, address, leave_by)
        elif known.state is State.DRAINING:
            known.state, known.failures, known.leave_by = State.WAITING, 0, leave_by
        return known is None

    def drain(self, side: Side, address: Address, give_up_s: float) -> Instance | None:
        """No new requests; it leaves when it has no more, or after ``give_up_s``. None where there is none with that address."""
        instance = self._instances.get((side, address))
        if instance is not None:
            instance.state, instance.leave_by = State.DRAINING, self._clock() + give_up_s
            self.released(instance)
        return instance

    def claim(self, side: Side, tokens: int, prefix: bytes | None = None, without: Collection[Address] = ()) -> Claim:
        """The least loaded instance, or the one that ``prefix`` prefers; one of ``without`` only where no other is ready.

        NoInstanceError where none is."""
        ready = self.ready(side, without) or self.ready(side)
        if not ready:
            raise NoInstanceError(side)
        chosen = min(ready, key=lambda one: (one.score, one.requests, one.used))
        if prefix is not None:
            preferred = max(ready, key=lambda one: hashlib.blake2b(prefix + str(one.address).encode(), digest_size=8).digest())
            if preferred.score - chosen.score <= 10 * self._slack:
                chosen = preferred
        self._claims += 1
        chosen.used = self._claims
        return Claim(self, chosen, tokens)

    def report(self, instance: Instance, ok: bool) -> bool:
        """What a request or a probe found; True where that changed the state."""
        before = instance.state
        instance.failures = 0 if ok else instance.failures + 1
        if ok and before in (State.WAITING, State.DOWN):
            instance.state, instance.leave_by = State.READY, None
            instance.starts += 1
        elif before is State.READY and instance.failures >= self._down_after:
            instance.state = State.DOWN
        return instance.state is not before

    def released(self, instance: Instance) -> None:
        if instance.state is State.DRAINING and instance.idle:
            self._remove(instance)

    def sweep(self) -> list[Instance]:
        """Remove those whose time is over; they are returned."""
        over = [one for one in self.instances() if one.leave_by is not None and one.leave_by <= self._clock()]
        for instance in over:
            self._remove(instance)
        return over

    def _remove(self, instance: Instance) -> None:
        if self._instances.get((instance.side, instance.address)) is instance:
            del self._instances[instance.side, instance.address]
