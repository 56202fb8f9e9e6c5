"""The scheduler side of loads: which tokens the pool can supply, and under which lease."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.core.breaker import Breaker
from kvpool.core.hits import GroupSpec, alignment
from kvpool.engine.agreement import Space
from kvpool.engine.lookup import Found, LookupService
from kvpool.engine.requests import RequestState
from kvpool.engine.stats import PoolStats

if TYPE_CHECKING:
    from vllm.v1.request import Request


IDLE_WAIT_S = 0.005  # for lookups, in a step that has nothing else to do: an empty step costs about as much


@dataclass(frozen=True)
class MatchLimits:
    """Seconds: how long one step may wait for lookups, and when a lookup counts as failed."""

    wait_s: float
    timeout_s: float
    min_hit_tokens: int


class Matcher:
    """Answers ``get_num_new_matched_tokens``. Every lookup it starts ends in a lease taken over, or is abandoned."""

    def __init__(
        self, service: LookupService, groups: Sequence[GroupSpec], limits: MatchLimits, breaker: Breaker, stats: PoolStats
    ) -> None:
        self._service = service
        self._groups = groups
        self._step = alignment(groups)
        self._limits = limits
        self._breaker = breaker
        self._stats = stats
        self._budget = limits.wait_s
        self.waiting = False  # for an answer, in this step

    def new_step(self, idle: bool = False) -> None:
        """The waits of one scheduling step share one budget, however many requests wait. ``idle``: the step before had nothing to
        compute."""
        self._budget = max(self._limits.wait_s, IDLE_WAIT_S if idle and self._limits.wait_s else 0.0)
        self.waiting = False

    def match(self, state: RequestState, computed: int, space: Space) -> int | None:
        """Tokens that the pool can supply beyond ``computed``; None means ask again. May be called any number of times."""
        request = state.request
        limit = self._limit(request)
        if limit <= computed or request.skip_reading_prefix_cache:
            self.forget(state)
            state.outcome = None  # the engine may have come to hold it all while the request waited for room
            return 0
        if state.loads_failed or state.gave_up:
            self.forget(state)
            if state.loads_failed and state.outcome is None:
                state.outcome = (0, 0, "load_failed")  # its tokens were asked for, and counted, before
            return 0
        found = self._answer(state, computed, limit, space)
        if found is None:
            return None
        tokens = found.tokens - computed
        if 0 < tokens < self._limits.min_hit_tokens:
            state.outcome = (limit - computed, 0, "below_min_hit_tokens")
            return 0
        state.outcome = (limit - computed, max(0, tokens), found.reason)
        return max(0, tokens)

    def refuse(self, state: RequestState, computed: int, reason: str) -> None:
        """The pool cannot be asked for this request now."""
        limit = self._limit(state.request)
        asked = limit > computed and not state.request.skip_reading_prefix_cache
        queried = 0 if state.loads_failed else limit - computed  # those of a load that failed were counted before
        state.outcome = (queried, 0, reason) if asked else None

    def count(self, state: RequestState, loading: bool) -> None:
        """Once per admission: what was asked for and what of it the request gets."""
        if state.outcome is None:
            return
        queried, tokens, reason = state.outcome
        state.outcome = None
        if tokens and not loading:
            tokens, reason = 0, "unused"  # vLLM, or another connector, had something better
        reason = reason or "given_back"
        self._stats.add("lookups")
        self._stats.add("queried_tokens", queried)
        self._stats.add("hit_tokens", tokens)
        self._stats.add("hits" if tokens else f"misses/reason={reason}")
        if queried > tokens:
            self._stats.add(f"missed_tokens/reason={reason}", queried - tokens)

    def may_wait(self, state: RequestState) -> bool:
        """Whether a request may be asked about again because something is not known yet: for as long as a lookup may take."""
        if state.waiting_since is None:
            state.waiting_since = time.monotonic()
        return time.monotonic() - state.waiting_since < self._limits.timeout_s

    def forget(self, state: RequestState) -> None:
        """Drop the lookup and its lease."""
        if state.lookup is not None:
            self._service.abandon(state.lookup)
        state.lookup, state.found = None, None

    def _limit(self, request: Request) -> int:
        """The last token is always computed, and a hit ends at a block boundary of every group."""
        hashed = len(request.block_hashes) * self._groups[0].block_size // self._groups[0].units
        return min(request.num_tokens - 1, hashed) // self._step * self._step

    def _answer(self, state: RequestState, computed: int, limit: int, space: Space) -> Found | None:
        lookup = state.lookup
        if lookup is not None and (lookup.limit != limit or lookup.computed > computed or self._stale(state)):
            self.forget(state)
            lookup = None
        if lookup is None:
            if not self._breaker.allow():
                return Found(computed, "breaker_open")
            lookup = state.lookup = self._service.start(space, list(state.request.block_hashes), computed, limit)
        if state.found is not None:
            return state.found
        started = time.monotonic()
        done = lookup.ticket.wait(self._budget)
        self._budget = max(0.0, self._budget - (time.monotonic() - started))
        if not done and lookup.age() < self._limits.timeout_s:
            self.waiting = True
            return None
        if not done or lookup.ticket.value is None:
            # Waiting for a turn behind other lookups says nothing about the store, unless it keeps all threads.
            if not lookup.queued() or self._service.stuck_for() >= self._limits.timeout_s:
                self._breaker.failure()
            if not done:
                self._stats.observe("lookup_seconds", lookup.age())
            self.forget(state)
            # Once per admission: the request goes on without the pool instead of asking again.
            state.gave_up = True
            return Found(computed, "unknown" if done else "timeout")
        found = lookup.ticket.value
        nothing = found.tokens <= lookup.computed
        self._breaker.failure() if nothing and found.reason == "unknown" else self._breaker.success()
        self._stats.observe("lookup_seconds", found.seconds)
        state.found = found
        return found

    def _stale(self, state: RequestState) -> bool:
        """A lease about to end does not cover a load that starts now."""
        lease = state.found.lease if state.found is not None else None
        return lease is not None and lease.half_over()
