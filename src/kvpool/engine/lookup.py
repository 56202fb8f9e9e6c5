"""Lookups: how much of a prompt the pool holds, asked off the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvpool.core.hits import GroupKind, GroupSpec, Presence, find_prefix, needed_blocks
from kvpool.core.keys import block_keys, group_hashes
from kvpool.core.recent import RecentSet
from kvpool.core.sources import Run, source_runs
from kvpool.engine.agreement import Space
from kvpool.engine.threads import Ticket, WorkerThreads
from kvpool.stores.base import EVICTED, UNKNOWN, Answer, Hit, Lease, Store, Tier

PROBE_BLOCKS = 512  # blocks asked for in one call: a long prompt stops at its first gap
LEASE_ROUNDS = 3
TIERS = (Tier.DRAM, Tier.REMOTE, Tier.DISK)  # nearest first: a tier's place is its rank
_RANKS = {tier: rank for rank, tier in enumerate(TIERS)}

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What a lookup found: ``tokens`` of prefix are readable and leased, and come from the tiers of ``runs``. ``reason`` tells why
    it is not more; empty where nothing was missing."""

    tokens: int
    reason: str = ""
    lease: Lease | None = None
    seconds: float = 0.0
    runs: tuple[Run, ...] = ()


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

    def backlog(self) -> int:
        """Lookups that wait for a thread."""
        return self._threads.backlog()

    def oldest(self) -> float:
        """Seconds for which the oldest of them has waited."""
        return self._threads.oldest()

    def run(self, task: Callable[[], T]) -> Ticket[T]:
        """Run something that asks the store off the engine's thread."""
        return self._threads.submit(task)

    def close(self, timeout_s: float) -> None:
        self._threads.close(timeout_s)

    def _find(self, space: Space, hashes: list[bytes], computed: int, limit: int) -> Found:
        started = time.monotonic()
        found = self._search(_Search(self._store, self._groups, space, hashes, self._negatives), computed, limit)
        return replace(found, seconds=time.monotonic() - started)

    def _search(self, search: _Search, computed: int, limit: int) -> Found:
        for _ in range(LEASE_ROUNDS):
            search.gaps.clear()
            prefix = find_prefix(self._groups, computed, limit, search.probe)
            if self._give_back and prefix.tokens > computed:
                prefix = find_prefix(self._groups, computed, prefix.tokens - self._give_back, search.probe)
            if prefix.tokens <= computed:
                return Found(computed, "unknown" if prefix.unknown else search.reason(computed))
            keys = search.keys_of(computed, prefix.tokens)
            if not self._store.capabilities.leases:
                return Found(prefix.tokens, search.reason(prefix.tokens), runs=search.runs(computed, prefix.tokens))
            lease = _lease(self._store, keys, self._lease_s)
            if lease is None:
                return Found(computed, "unknown")
            gone = [k for k, a in zip(keys, lease.answers, strict=True) if not isinstance(a, Hit)]
            if UNKNOWN in lease.answers:
                self._store.release(lease)
                return Found(computed, "unknown")
            if not gone:
                search.note(keys, lease.answers)
                return Found(prefix.tokens, search.reason(prefix.tokens), lease, runs=search.runs(computed, prefix.tokens))
            self._store.release(lease)
            search.lost.update(gone)
        return Found(computed, "lease_lost")


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
        self.gaps: list[tuple[int, str]] = []  # where a missing block begins, in tokens, and why it counts as missing
        self._far: dict[bytes, int] = {}  # keys of farther tiers than the nearest, by rank

    def probe(self, group: int, first: int, last: int) -> list[Presence]:
        answers: list[Presence] = []
        for start in range(first, last, PROBE_BLOCKS):
            end = min(start + PROBE_BLOCKS, last)
            chunk = self._ask(group, start, group_hashes(self._hashes, self._groups[group].units, start, end))
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

    def reason(self, tokens: int) -> str:
        """Why a prefix of ``tokens`` tokens is not longer; empty where nothing was missing behind it."""
        return min((gap for gap in self.gaps if gap[0] >= tokens), default=(0, ""))[1]

    def note(self, keys: Sequence[bytes], answers: Sequence[Answer]) -> None:
        """Remember where objects lie."""
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, Hit) and answer.tier is not Tier.DRAM:
                self._far[key] = _RANKS[answer.tier]
            elif self._far:
                self._far.pop(key, None)

    def runs(self, computed: int, tokens: int) -> tuple[Run, ...]:
        """The tiers that a hit of ``tokens`` tokens reads from."""
        groups = []
        for index, group in enumerate(self._groups):
            blocks = needed_blocks(group, computed, tokens)
            ranks = [0] * len(blocks)
            if self._far:
                hashes = group_hashes(self._hashes, group.units, blocks.start, blocks.stop)
                for shard in self._shards[index]:
                    keys = block_keys(shard.prefix, hashes)
                    ranks = [max(rank, self._far.get(key, 0)) for rank, key in zip(ranks, keys, strict=True)]
            groups.append((group.block_size, blocks.start, ranks))
        return tuple(source_runs(groups, computed, tokens))

    def _ask(self, group: int, first: int, hashes: list[bytes]) -> list[Presence]:
        states = [Presence.MISS if (group, h) in self._negatives else Presence.HIT for h in hashes]
        causes = {i: "negative_cache" for i, state in enumerate(states) if state is Presence.MISS}
        for shard in self._shards[group]:
            asked = [i for i, state in enumerate(states) if state is Presence.HIT]
            if not asked:
                break
            keys = block_keys(shard.prefix, [hashes[i] for i in asked])
            answers = _exists(self._store, keys)
            self.note(keys, answers)
            for i, key, answer in zip(asked, keys, answers, strict=True):
                # An object of another length is none that this engine can use, whoever wrote it.
                if not isinstance(answer, Hit) or answer.nbytes not in (0, shard.nbytes) or key in self.lost:
                    states[i] = Presence.UNKNOWN if answer is UNKNOWN else Presence.MISS
                    causes[i] = "lease_lost" if key in self.lost else _cause(answer)
        self._note_gaps(group, first, causes)
        return states

    def _note_gaps(self, group: int, first: int, causes: dict[int, str]) -> None:
        """Of a full group the first gap is all that counts; a window ends at whichever it meets."""
        if causes:
            spec = self._groups[group]
            missing = [min(causes)] if spec.kind is GroupKind.FULL else causes
            self.gaps += [((first + i) * spec.block_size, causes[i]) for i in missing]


def _cause(answer: Answer) -> str:
    if isinstance(answer, Hit):
        return "wrong_size"
    return {EVICTED: "evicted", UNKNOWN: "unknown"}.get(answer, "absent")


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
