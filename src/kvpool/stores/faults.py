"""What a faulty store does wrong, and when: a plan that can be switched at run time, also from another process.

The plan is JSON::

    {
      "seed": 0,                    # of the fractions
      "abandonable": false,         # optional: what the store's capabilities then say
      "calls": {"get": {"corrupt": true, "every": 3}, "put": {"status": "transient", "indexes": [0]}}
    }

Call kinds: open, exists, lease, release, put, get, begin_write, write, commit, abort, begin_read, read, end, reserve, publish,
discard, pin, unpin, remove, list, clear, stats, health, write_note, notes. What a fault may say:

| field | meaning |
|---|---|
| delay_s | wait that long, then go on |
| hang | wait until the plan no longer says so (or the store is closed), then go on |
| error | raise RuntimeError with this text |
| status | answer this Status ("transient", "fatal", "missing", "no_space", ...) for the chosen keys, which the store never sees |
| unknown | exists, lease: UNKNOWN for the chosen keys |
| full | the same as status "no_space"; reserve gives no slots |
| lose | put, commit, publish: OK, but the chosen objects are not stored |
| corrupt | get, read: the lowest bit of every byte of the chosen objects is flipped |
| result_change | this many results more (or, below 0, fewer) than there are keys |
| late_s | put, get: not done at the deadline, abandon() answers False; so long after it the memory is read or written after all |
| indexes, every, fraction, contains | the chosen keys: by place (-1: last), every n-th, a random share, with this text; or all |
| times | the fault ends after so many calls of this process |
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvpool.stores.base import Result, Status

logger = logging.getLogger(__name__)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    delay_s: float = 0.0
    hang: bool = False
    error: str = ""
    status: Status | None = None
    unknown: bool = False
    full: bool = False
    lose: bool = False
    corrupt: bool = False
    result_change: int = 0
    late_s: float | None = None
    indexes: tuple[int, ...] | None = None
    every: int = 0
    fraction: float = 1.0
    contains: str = ""
    times: int = 0

    @property
    def refusal(self) -> Result | None:
        """What the chosen keys are answered instead of being handled."""
        if self.full:
            return Result(Status.NO_SPACE, text="injected")
        return None if self.status is None else Result(self.status, text="injected")

    def chosen(self, keys: Sequence[bytes], chance: random.Random) -> list[int]:
        """Places of the keys that the fault hits."""
        count = len(keys)
        rows = range(count) if self.indexes is None else [row % count for row in self.indexes if -count <= row < count]
        hit = [row for row in rows if self.contains.encode() in keys[row]]
        if self.every > 0:
            hit = [row for row in hit if (row + 1) % self.every == 0]
        return [row for row in hit if self.fraction >= 1.0 or chance.random() < self.fraction]


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    seed: int = 0
    abandonable: bool | None = None
    calls: dict[str, Fault] = msgspec.field(default_factory=dict)


NONE = Fault()
KINDS = frozenset(
    [
        "open",
        "exists",
        "lease",
        "release",
        "put",
        "get",
        "begin_write",
        "write",
        "commit",
        "abort",
        "begin_read",
        "read",
        "end",
        "reserve",
        "publish",
        "discard",
        "pin",
        "unpin",
        "remove",
        "list",
        "clear",
        "stats",
        "health",
        "write_note",
        "notes",
    ]
)


class FaultPlan:
    """Thread-safe. With ``path`` the file is read again whenever it changes; while it is missing there are no faults from it. A
    file that cannot be understood is a ValueError at first, and later leaves the plan as it was, with a warning."""

    def __init__(self, plan: dict[str, object] | None = None, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._plan = _convert(plan or {})
        self._used: dict[str, int] = {}
        self.chance = random.Random(self._plan.seed)
        if path is not None:
            self._reload(strict=True)

    def update(self, kind: str, **fault: object) -> None:
        """Set the fault of a call kind; without fields, end it. ValueError for an unknown kind or field."""
        change = _convert({"calls": {kind: fault}})
        with self._lock:
            self._plan.calls.update(change.calls)
            self._used.pop(kind, None)

    def set_abandonable(self, value: bool | None) -> None:
        with self._lock:
            self._plan.abandonable = value

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._plan = _PlanFile(self._plan.seed)
            self._used.clear()

    @property
    def abandonable(self) -> bool | None:
        self._reload()
        return self._plan.abandonable

    def begin(self, kind: str) -> Fault:
        """The fault of a call that begins now; counts it."""
        self._reload()
        with self._lock:
            fault = self._plan.calls.get(kind, NONE)
            if fault.times:
                self._used[kind] = self._used.get(kind, 0) + 1
                if self._used[kind] > fault.times:
                    return NONE
            return fault

    def now(self, kind: str) -> Fault:
        """The fault of a kind as the plan is now."""
        self._reload()
        return self._plan.calls.get(kind, NONE)

    def _reload(self, *, strict: bool = False) -> None:
        if self._path is None:
            return
        try:
            info = self._path.stat()
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
            raw = self._path.read_bytes() if stamp != self._stamp else None
        except FileNotFoundError:
            stamp, raw = (0, 0, 0), b"{}" if self._stamp != (0, 0, 0) else None
        if raw is None:
            return
        try:
            plan = _convert(msgspec.json.decode(raw))
        except (ValueError, msgspec.MsgspecError) as error:
            if strict:
                raise ValueError(f"{self._path}: {error}") from None
            logger.warning("%s is no fault plan, the last one stays (%s)", self._path, error)
            plan = self._plan
        with self._lock:
            if plan is not self._plan:
                self._used.clear()
            self._stamp, self._plan = stamp, plan


def _convert(raw: object) -> _PlanFile:
    try:
        plan = msgspec.convert(raw, _PlanFile)
    except msgspec.ValidationError as error:
        raise ValueError(f"fault plan: {error}") from None
    unknown = sorted(set(plan.calls) - KINDS)
    if unknown:
        raise ValueError(f"fault plan: no call is named {unknown[0]!r}")
    return plan
