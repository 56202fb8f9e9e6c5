"""The store contract: the vocabulary and the calls that every pool backend answers.

Words used here (see docs/concepts.md): an *object* is the pages of one block for a span of layers and heads; a *key* names it;
a *slot* is room for one object in a mapped store, anonymous until published; a *lease* is the promise that objects stay readable
until a time; *pin* is the same promise for as long as the pinning process lives.

Rules for every store:

- Thread-safety: every method may be called from any thread at any time between ``open`` and ``close``; after ``close`` every call
  answers UNKNOWN or FATAL and touches nothing.
- Atomicity: an object is visible whole or not at all. A write that ends early leaves nothing visible.
- Errors travel in results, never as exceptions, except ``ValueError`` for a call that breaks this contract (wrong shapes).
- Results stand in the order of the keys. A batch is split inside the store where the backend limits its size.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.int64]


class Status(enum.Enum):
    """How one key of a call ended."""

    OK = "ok"
    EXISTS = "exists"  # put: somebody stored it before; counts as success
    BUSY = "busy"  # put: somebody is writing it just now; not a success, offer it again later
    MISSING = "missing"  # get: not there, or quarantined
    NO_SPACE = "no_space"
    TRANSIENT = "transient"  # timeout or a passing fault; one retry is worth it
    FATAL = "fatal"  # the store is down or closed


class Tier(enum.Enum):
    """Where an object lies."""

    DRAM = "dram"
    DISK = "disk"
    REMOTE = "remote"


class Result(NamedTuple):
    """``nbytes`` is what moved for an OK get or put, else 0; ``code`` and ``text`` are the backend's own, where it has any.

    ``tier`` is where an OK get read from or an OK put wrote to; None where the store does not know."""

    status: Status
    nbytes: int = 0
    code: int | None = None
    text: str = ""
    tier: Tier | None = None

    @property
    def stored(self) -> bool:
        """True when the object is readable in the store now (OK or EXISTS of a put)."""
        return self.status is Status.OK or self.status is Status.EXISTS


class Hit(NamedTuple):
    """The object can be read now, from ``tier``; ``nbytes`` long, or 0 where the store does not tell lengths."""

    tier: Tier
    nbytes: int


class Absent(enum.Enum):
    """Why a lookup has no object to offer. UNKNOWN (the store could not say) is treated as a miss but never reported as one.

    EVICTED is a MISS of which the store remembers that it once held the object; a store without such a memory never says it, and
    one with it need say it only of the first missing key of a call."""

    MISS = "miss"
    EVICTED = "evicted"
    UNKNOWN = "unknown"


MISS = Absent.MISS
EVICTED = Absent.EVICTED
UNKNOWN = Absent.UNKNOWN
Answer = Hit | Absent


@dataclass(frozen=True, slots=True)
class Batch:
    """Objects of one layout on their way into or out of a store.

    ``addresses[i, j]`` is where segment j of object i lies in this process (int64, shape ``[len(keys), len(sizes)]``);
    ``sizes[j]`` is its length in bytes, the same for every object. An object is the concatenation of its segments in order.
    The memory must stay valid and, for a put, unchanged until the handle is done. A key may appear only once.
    """

    keys: Sequence[bytes]
    addresses: Addresses
    sizes: Addresses

    def __post_init__(self) -> None:
        if self.addresses.shape != (len(self.keys), len(self.sizes)):
            raise ValueError(f"addresses have shape {self.addresses.shape}, expected {(len(self.keys), len(self.sizes))}")

    @property
    def object_nbytes(self) -> int:
        return int(self.sizes.sum())


class Handle(Protocol):
    """A put or get under way."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until done, at most ``timeout_s``; True when done. A deadline ends the wait, not the transfer."""
        ...

    def results(self) -> list[Result]:
        """One per key. ValueError while not done."""
        ...

    def abandon(self) -> bool:
        """True: not one byte moves from or into the caller's memory from now on. False: wait until done before reusing it."""
        ...


@dataclass(slots=True)
class Done:
    """The handle of a call that ended before it returned."""

    outcome: list[Result]

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def results(self) -> list[Result]:
        return self.outcome

    def abandon(self) -> bool:
        return True


@dataclass(slots=True)
class Lease:
    """What ``lease`` granted. ``answers[i]`` is a Hit exactly where key i is protected; release it once, from any thread."""

    keys: Sequence[bytes]
    answers: list[Answer]
    until: float  # time.monotonic() at which the promise ends
    token: object = field(default=None, repr=False)
    since: float = field(default_factory=time.monotonic)

    def half_over(self) -> bool:
        """Time to take another, where the objects are still needed. A store may have granted less than it was asked for."""
        return time.monotonic() > (self.since + self.until) / 2


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do. ``abandonable``: a get or put past its deadline can be abandoned at once, so sync loads are safe."""

    mapped: bool = False
    ranged: bool = False
    listable: bool = False
    device_memory: bool = False
    abandonable: bool = False
    leases: bool = False
    host_bound: bool = False  # reaches only processes of this host
    max_key_len: int = 255


class Health(NamedTuple):
    """Not ``ok`` says why; ``readable``: it is not well, but what it holds can be read."""

    ok: bool
    text: str = ""
    readable: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier at one moment. Counters (evicted, written, errors) are those of the whole pool, of all its processes together."""

    tier: Tier
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    evicted_objects: int = 0
    written_bytes: int = 0  # for a disk, what wears it
    errors: int = 0  # I/O errors and bad checksums
    dropped_objects: int = 0  # that left the tier above before they could be copied to this one
    ok: bool = True  # False: the tier is switched off after a failure


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Gauges of a store at one moment; bytes and counts are never negative and ``used_bytes`` never exceeds ``capacity_bytes``.

    The plain fields are those of the first tier; ``tiers`` has every tier, fastest first, where a store can tell them apart."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    evicted_objects: int = 0
    leases: int = 0
    pinned: int = 0
    writing: int = 0
    tiers: tuple[TierStats, ...] = ()


class Writer(ABC):
    """Objects that are written in pieces. Nothing is visible before ``commit``; exactly one of ``commit`` and ``abort`` ends it."""

    results: list[Result]  # of begin_write: OK where this writer may write object i

    @abstractmethod
    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        """Copy segments into objects ``rows`` from byte ``offset`` on; ``addresses`` is [len(rows), len(sizes)]. Blocking."""

    @abstractmethod
    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        """Publish the given objects (default: all begun) and drop the others; one result per key of ``begin_write``."""

    @abstractmethod
    def abort(self) -> None: ...


class Reader(ABC):
    """Objects that are read in pieces; they stay readable until ``end``."""

    results: list[Result]  # of begin_read: OK where object i can be read

    @abstractmethod
    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        """Copy bytes of objects ``rows`` from byte ``offset`` on into the segments. Blocking."""

    @abstractmethod
    def end(self) -> None: ...


class Store(ABC):
    """A pool backend. ``open`` and ``close`` are a pair; so are ``lease`` and ``release``."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def open(self) -> None:
        """Connect; OSError or ValueError with the reason in one line. Heavy libraries are imported here, not before."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Waits for running calls, at most a few seconds."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Tell the store which memory (address, nbytes) put and get will use. Idempotent; a no-op where nothing needs it."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[Answer]:
        """Which objects can be read now. Takes no lease. Never raises: what cannot be told is UNKNOWN."""

    @abstractmethod
    def lease(self, keys: Sequence[bytes], seconds: float) -> Lease:
        """Protect the objects that are there from eviction for ``seconds``, and say which those are."""

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """End a lease early. Idempotent."""

    @abstractmethod
    def put(self, batch: Batch, deadline_s: float) -> Handle:
        """Store objects. ``deadline_s`` is how long the store may take from now; over it the rest is TRANSIENT."""

    @abstractmethod
    def get(self, batch: Batch, deadline_s: float) -> Handle:
        """Read objects into the segments. A segment of an object whose result is not OK holds undefined bytes."""

    @abstractmethod
    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer: ...

    @abstractmethod
    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader: ...

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> list[Result]:
        """OK or MISSING per key; BUSY where it is leased or being read: it is then no longer found, and its room is reused
        later."""

    def list(self, prefix: bytes = b"") -> list[bytes]:
        """Keys that start with ``prefix``; only where ``capabilities.listable``."""
        raise NotImplementedError(f"{self.name} cannot list keys")

    def clear(self, prefix: bytes) -> int:
        """Remove every key that starts with ``prefix``; how many. Only where ``capabilities.listable``."""
        raise NotImplementedError(f"{self.name} cannot clear by prefix")

    def write_note(self, name: bytes, text: str) -> None:
        """Leave a small text under a well-known name, for engines that come later; a store that cannot keep notes does nothing."""

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        """The notes whose names start with ``prefix``."""
        return {}

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def health(self) -> Health:
        """A quick probe (milliseconds), used by the circuit breaker."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one object: ``address`` in this process, ``nbytes`` writable; ``token`` is the store's own."""

    address: int
    nbytes: int
    token: object = field(repr=False)


@dataclass(slots=True)
class Pins:
    """Objects pinned for reading in place. ``addresses[i]`` is 0 where the key is missing. End with ``unpin``, once."""

    addresses: list[int]
    nbytes: list[int]
    token: object = field(default=None, repr=False)


class MappedStore(Store):
    """A store whose memory this process can address: pairs are reserve -> publish | discard, and pin -> unpin."""

    @abstractmethod
    def reserve(self, count: int, nbytes: int, deadline_s: float) -> list[Slot]:
        """Up to ``count`` anonymous slots (fewer when full). They are this process's until published or discarded; if it dies
        they are reclaimed."""

    @abstractmethod
    def publish(self, pairs: Sequence[tuple[Slot, bytes]], deadline_s: float) -> list[Result]:
        """Give slots their keys: OK, EXISTS (the slot is discarded), or TRANSIENT (the slot is still reserved)."""

    @abstractmethod
    def discard(self, slots: Sequence[Slot]) -> None: ...

    @abstractmethod
    def pin(self, keys: Sequence[bytes]) -> Pins: ...

    @abstractmethod
    def unpin(self, pins: Pins) -> None: ...
