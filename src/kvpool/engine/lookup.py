"""Lookups: how much of a prompt the pool holds, asked off the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvpool.core.hits import GroupKind, GroupSpec, Presence, find_prefix, needed_blocks
from kvpool.core.keys import block_keys, group_hashes
from kvpool.core.recent import RecentSet
from kvpool.engine.agreement import Space
from kvpool.engine.threads import Ticket, WorkerThreads
from kvpool.stores.base import UNKNOWN, Answer, Hit, Lease, Store

PROBE_BLOCKS = 512  # blocks asked for in one call: a long prompt stops at its first gap
LEASE_ROUNDS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What a lookup found: ``tokens`` of prefix are readable and leased. ``reason`` tells why it is not more."""

    tokens: int
    reason: str = "absent"
    lease: Lease | None = None
    seconds: float = 0.0


@dataclass
class Lookup:
    """One lookup of one request, from ``computed`` tokens on. ``abandon`` it once if its lease is not taken over."""

    computed: int
    limit: int
    ticket: Ticket[Found]
    asked: float = field(default_factory=time.monotonic)

    def age(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self.asked

    def queued(self) -> bool:
        """Whether it still waits for its turn behind other lookups."""
        return self.ticket.started is None


class LookupService:
    """Asks a store through a few threads of its own. ``give_back`` tokens at the end of every hit are to be computed again."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[GroupSpec],
        lease_s: float,
        negatives: RecentSet,
        give_back: int = 0,
        threads: int = 2,
    ) -> None:
        self._store = store
        self._groups = groups
        self._lease_s = lease_s
        self._negatives = negatives
        self._give_back = give_back
        self._threads = WorkerThreads("lookup", threads)

    def start(self, space: Space, hashes: list[bytes], computed: int, limit: int) -> Lookup:
        return Lookup(computed, limit, self._threads.submit(lambda: self._find(space, hashes, computed, limit)))

    def abandon(self, lookup: Lookup) -> None:
        """Give up a lookup, finished or not: the lease it took or will take is released."""
        lookup.ticket.cancel()
        lookup.ticket.then(lambda ticket: self.release(ticket.value.lease) if ticket.value is not None else None)

    def release(self, lease: Lease | None) -> None:
        """Off the engine's thread: a store may be slow here, or fail."""
        if lease is not None:
            self._threads.submit(lambda: self._store.release(lease))

    def renew(self, lease: Lease) -> Ticket[Lease]:
        """Lease the same objects anew; whichever of the two leases is not the answer is released."""

        def task() -> Lease:
            fresh = _lease(self._store, list(lease.keys), self._lease_s)
            if fresh is None:
                return lease
            whole = all(isinstance(answer, Hit) for answer in fresh.answers)
            self._store.release(lease if whole else fresh)
            return fresh if whole else lease

        return self._threads.submit(task)

    def stuck_for(self) -> float:
        """Seconds for which the store has kept every lookup thread."""
        return self._threads.stuck_for()

    def run(self, task: Callable[[], T]) -> Ticket[T]:
        """Run something that asks the store off the engine's thread."""
        return self._threads.submit(task)

    def close(self, timeout_s: float) -> None:
        self._threads.close(timeout_s)

    def _find(self, space: Space, hashes: list[bytes], computed: int, limit: int) -> Found:
        started = time.monotonic()
        search = _Search(self._store, self._groups, space, hashes, self._negatives)
        for _ in range(LEASE_ROUNDS):
            prefix = find_prefix(self._groups, computed, limit, search.probe)
            if self._give_back and prefix.tokens > computed:
                prefix = find_prefix(self._groups, computed, prefix.tokens - self._give_back, search.probe)
            if prefix.tokens <= computed:
                return Found(computed, "unknown" if prefix.unknown else search.reason, seconds=time.monotonic() - started)
            keys = search.keys_of(computed, prefix.tokens)
            if not self._store.capabilities.leases:
                return Found(prefix.tokens, seconds=time.monotonic() - started)
            lease = _lease(self._store, keys, self._lease_s)
            if lease is None:
                return Found(computed, "unknown", seconds=time.monotonic() - started)
            gone = [k for k, a in zip(keys, lease.answers, strict=True) if not isinstance(a, Hit)]
            if UNKNOWN in lease.answers:
                self._store.release(lease)
                return Found(computed, "unknown", seconds=time.monotonic() - started)
            if not gone:
                return Found(prefix.tokens, lease=lease, seconds=time.monotonic() - started)
            self._store.release(lease)
            search.lost.update(gone)
        return Found(computed, "lease_lost", seconds=time.monotonic() - started)


class _Search:
    """The answers of one lookup. One shard per block is asked first, the others only for blocks that have it."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[GroupSpec],
        space: Space,
        hashes: list[bytes],
        negatives: RecentSet,
    ) -> None:
        self._store = store
        self._groups = groups
        self._shards = space.shards
        self._hashes = hashes
        self._negatives = negatives
        self.lost: set[bytes] = set()
        self.reason = "absent"

    def probe(self, group: int, first: int, last: int) -> list[Presence]:
        answers: list[Presence] = []
        for start in range(first, last, PROBE_BLOCKS):
            end = min(start + PROBE_BLOCKS, last)
            chunk = self._ask(group, group_hashes(self._hashes, self._groups[group].units, start, end))
            answers += chunk + [Presence.MISS] * (end - start - len(chunk))
            if self._groups[group].kind is GroupKind.FULL and any(a is not Presence.HIT for a in chunk):
                break
        return answers

    def keys_of(self, computed: int, tokens: int) -> list[bytes]:
        """Every key that a hit of ``tokens`` tokens reads."""
        keys: list[bytes] = []
        for index, group in enumerate(self._groups):
            blocks = needed_blocks(group, computed, tokens)
            hashes = group_hashes(self._hashes, group.units, blocks.start, blocks.stop)
            for shard in self._shards[index]:
                keys += block_keys(shard.prefix, hashes)
        return keys

    def _ask(self, group: int, hashes: list[bytes]) -> list[Presence]:
        states = [Presence.MISS if (group, h) in self._negatives else Presence.HIT for h in hashes]
        if Presence.MISS in states:
            self.reason = "load_failed"
        for shard in self._shards[group]:
            asked = [i for i, state in enumerate(states) if state is Presence.HIT]
            if not asked:
                break
            keys = block_keys(shard.prefix, [hashes[i] for i in asked])
            for i, key, answer in zip(asked, keys, _exists(self._store, keys), strict=True):
                # An object of another length is none that this engine can use, whoever wrote it.
                if not isinstance(answer, Hit) or answer.nbytes != shard.nbytes or key in self.lost:
                    states[i] = Presence.UNKNOWN if answer is UNKNOWN else Presence.MISS
        return states


def _exists(store: Store, keys: list[bytes]) -> list[Answer]:
    """``store.exists``, where a store that raises or answers for too few keys could not tell."""
    try:
        answers = store.exists(keys)
    except Exception:  # noqa: BLE001 - a lookup that fails is unknown, never a hit
        return [UNKNOWN] * len(keys)
    return list(answers) if answers is not None and len(answers) == len(keys) else [UNKNOWN] * len(keys)


def _lease(store: Store, keys: list[bytes], seconds: float) -> Lease | None:
    """``store.lease``; None where the store raises or answers for too few keys."""
    try:
        lease = store.lease(keys, seconds)
    except Exception:  # noqa: BLE001 - without a lease there is no hit
        return None
    return lease if len(lease.answers) == len(keys) else None
