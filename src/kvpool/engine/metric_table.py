"""Every metric, in one table: /metrics, docs/metrics.md and the tests of the dashboard and the alert rules are made from it.

Standard library only. Names get the prefix ``kvpool:``; samples of counters end in ``_total``, those of histograms in ``_bucket``,
``_sum`` and ``_count``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "kvpool:"
ENGINE_LABELS = ("model_name", "engine")  # of every metric of vLLM: ``engine`` is the data-parallel rank
SUFFIXES: dict[Kind, tuple[str, ...]] = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
LOOKUP_BUCKETS = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
MOVE_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    """One metric. ``shared``: it describes the store, which other engines see too: never sum it over engines."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    shared: bool = False

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of its samples."""
        return tuple(PREFIX + self.name + suffix for suffix in SUFFIXES[self.kind])


def _counter(name: str, text: str, *labels: str, shared: bool = False) -> Metric:
    return Metric(name, "counter", text, labels, shared=shared)


def _gauge(name: str, text: str, *labels: str, shared: bool = False) -> Metric:
    return Metric(name, "gauge", text, labels, shared=shared)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, buckets)


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Lookups": (
        _counter(
            "lookups",
            "Admissions of requests (again after a preemption) for which the pool was considered: hits and misses together",
        ),
        _counter("hits", "Of these, how many were given tokens of the pool"),
        _counter("misses", "Of these, how many were not, by the reason", "reason"),
        _counter("queried_tokens", "Tokens not held by the engine that a hit could have covered"),
        _counter("hit_tokens", "Of these, tokens that the pool was to supply"),
        _counter("missed_tokens", "Of these, tokens that it was not, by the reason of the first gap", "reason"),
        _histogram(
            "lookup_seconds",
            "From asking the store to its answer, off the scheduler's thread; a lookup that timed out counts with its age by then, "
            "the wait for a thread included",
            LOOKUP_BUCKETS,
        ),
    ),
    "Loads": (
        _counter("loads", "Load jobs of a rank that ended, by outcome (reason: ok, failed)", "reason"),
        _counter("loaded_tokens", "Tokens that were loaded, on all ranks, by tier", "tier"),
        _counter("loaded_blocks", "Objects loaded, by tier", "tier"),
        _counter("loaded_bytes", "Bytes loaded, by tier", "tier"),
        _histogram("load_seconds", "One load job on one rank, from its start to its end", MOVE_BUCKETS),
        _counter(
            "load_failures",
            "Objects that failed to load, by the store's status; blocks of jobs that failed whole: overdue, breaker_open, error",
            "reason",
        ),
    ),
    "Saves": (
        _counter("saves", "Save jobs of a rank that ended"),
        _counter(
            "saved_tokens",
            "Tokens (of the first KV-cache group) that were offered and are in the pool now, on all ranks: stored, or known before",
        ),
        _counter("saved_blocks", "Objects stored (those somebody stored before not counted), by tier", "tier"),
        _counter("saved_bytes", "Bytes stored, by tier", "tier"),
        _counter("known_blocks", "Objects offered that the store held already"),
        _histogram("save_seconds", "One save job on one rank, from its start to its end", MOVE_BUCKETS),
        _counter(
            "save_failures",
            "Objects not stored, by the store's status; blocks of jobs that failed whole: overdue, error",
            "reason",
        ),
        _counter(
            "dropped_blocks",
            "Blocks never given to the store, by the reason: pinned (too many are), breaker_open, asleep",
            "reason",
        ),
    ),
    "Speed": (
        _counter("call_bytes", "Bytes that store calls moved, by operation (load, save) and tier", "op", "tier"),
        _histogram(
            "call_seconds",
            "One store call, by operation and tier (mixed: its objects lie in several; none: it moved nothing)",
            MOVE_BUCKETS,
            "op",
            "tier",
        ),
    ),
    "Now": (
        _gauge("queued_jobs", "Jobs that wait for a thread (kind: lookup, load, save), of the rank that has most", "kind"),
        _gauge("oldest_job_seconds", "How long the oldest of them has waited", "kind"),
        _gauge("pinned_blocks", "Device blocks pinned by jobs"),
        _gauge("breaker_state", "Circuit breaker (kind: lookup, load, save): 0 closed, 1 half open, 2 open", "kind"),
    ),
    "The store": (
        _gauge("store_capacity_bytes", "Room of a tier", "tier", shared=True),
        _gauge("store_used_bytes", "Of which is used", "tier", shared=True),
        _gauge("store_objects", "Objects in a tier", "tier", shared=True),
        _gauge("store_ok", "1, or 0 while a tier is switched off after a failure", "tier", shared=True),
        _gauge("store_leases", "Objects that somebody leases", shared=True),
        _gauge("store_pinned", "Objects that somebody is reading", shared=True),
        _gauge("store_writing", "Objects that somebody is writing", shared=True),
        _counter("store_evicted_objects", "Objects evicted from a tier since this engine started", "tier", shared=True),
        _counter(
            "store_written_bytes", "Bytes written to a tier since this engine started: what wears a disk", "tier", shared=True
        ),
        _counter(
            "store_dropped_objects",
            "Objects that left memory before they were copied to this tier, since this engine started",
            "tier",
            shared=True,
        ),
        _counter("store_errors", "I/O errors and bad checksums of a tier since this engine started", "tier", shared=True),
    ),
    "Counters of KV events": (
        _counter("kv_events", "Blocks told of in KV events (kind: stored, removed)", "kind"),
        _counter("kv_events_dropped", "Blocks not told of because nobody took the events away"),
    ),
}
METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}

# Why a lookup came to nothing, or a hit is not longer: what it means, and what to do.
MISS_REASONS: dict[str, tuple[str, str]] = {
    "absent": (
        "the store has no such object and does not remember having had it",
        "normal for new prompts. Otherwise: do the prompts begin alike, do the namespaces agree (the zero-hit alarm says)?",
    ),
    "evicted": (
        "the pool held it and had to make room (`local` tells this from `absent`, other stores do not)",
        "a larger pool, or a disk tier: the reuse is there, the room is not",
    ),
    "unknown": ("the store could not say", "look at the store: its log, its health"),
    "timeout": (
        "no answer within `lookup_timeout_ms`",
        "is the host out of CPU, the store far away? `kvpool:lookup_seconds` and `kvpool:queued_jobs` tell which",
    ),
    "breaker_open": (
        "a circuit breaker bypasses the store after `breaker_failures` failures in a row",
        "`kvpool:breaker_state` says which; the log says what failed",
    ),
    "below_min_hit_tokens": ("found, but shorter than `min_hit_tokens`", "lower the option if short hits pay here"),
    "load_failed": (
        "asked again after a load of the same request had failed; its tokens are not counted a second time",
        "`kvpool:load_failures` by status",
    ),
    "negative_cache": (
        "a block that failed to load within the last `negative_cache_ms` is not offered again so soon",
        "`kvpool:load_failures` by status",
    ),
    "lease_lost": ("evicted between the lookup's two looks, three times over", "the pool is far too small for the load"),
    "wrong_size": ("there is an object of another length under the key", "should not happen: report it"),
    "not_ready": ("the ranks have not introduced themselves yet", "normal in the first step or two"),
    "not_pooled": (
        "the request's adapter cannot be read, or has changed since the start",
        "restart after changing an adapter's files",
    ),
    "unused": ("vLLM, or another connector, had something better", "normal under a MultiConnector"),
    "given_back": ("the end of a hit that a speculative drafter must compute again", "normal"),
}
