"""What is counted is what has happened: reasons, tiers, gauges, and their way to /metrics."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from types import SimpleNamespace

import prometheus_client
import pytest

from kvpool.engine.metric_table import METRICS, MISS_REASONS
from kvpool.engine.stats import GAUGE, SEEN, PoolPromMetrics, PoolStats, split_name
from kvpool.stores.base import Result, Status, Tier
from tests.contract.fakestore import FakeStore

PROMPT = list(range(100, 200))  # 6 full blocks and 4 tokens
HYBRID = (("full", 0), ("sliding", 24))


def total(counted: Counter[str], name: str) -> float:
    return sum(v for k, v in counted.items() if split_name(k)[0] == name)


def flush(engine) -> None:
    """One more step: vLLM takes away what the last one has counted. Its prompt is shorter than a block."""
    engine.settle()
    engine.ask(f"flush{engine.steps}", [7])


def count_asking(engine, name="b", prompt=PROMPT, max_tokens=1):
    engine.forget_local()
    flush(engine)
    counted = engine.count_metrics()
    engine.ask(name, prompt, max_tokens)
    flush(engine)
    assert total(counted, "hits") + total(counted, "misses") == counted["lookups"]
    assert total(counted, "hit_tokens") + total(counted, "missed_tokens") == counted["queried_tokens"]
    return counted


def stored(start, store=None, **fields):
    engine = start(store, **fields)
    engine.ask("a", PROMPT)
    engine.settle()
    return engine


def evict_from(engine, block: int) -> None:
    names = {h.hex().encode() for h in engine.requests["a"].block_hashes[block:]}
    engine.store.evict([key for key in engine.store.objects if key.rsplit(b":", 1)[1] in names])


def reasons(counted: Counter[str], name: str = "misses") -> dict[str, float]:
    return {split_name(k)[1]["reason"]: v for k, v in counted.items() if split_name(k)[0] == name and v}


def test_a_miss_tells_evicted_from_never_stored(start):
    engine = stored(start)
    evict_from(engine, 0)
    assert reasons(count_asking(engine)) == {"evicted": 1}
    assert reasons(count_asking(engine, "c", [t + 700 for t in PROMPT])) == {"absent": 1}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_reason_of_a_short_hit_is_that_of_its_first_gap(start, tp):
    engine = stored(start, tp=tp)
    engine.store.fail_keys("put", lambda key: True, Result(Status.NO_SPACE))
    evict_from(engine, 4)
    counted = count_asking(engine)
    assert (counted["hits"], counted["hit_tokens"], reasons(counted, "missed_tokens")) == (1, 64, {"evicted": 32})
    longer = count_asking(engine, "c", [*PROMPT[:64], *range(900, 990)])
    assert reasons(longer, "missed_tokens") == {"absent": longer["queried_tokens"] - 64}


def test_a_gap_in_the_window_is_the_reason_where_it_is_the_shorter(start):
    engine = stored(start, groups=HYBRID)
    names = {h.hex().encode() for h in engine.requests["a"].block_hashes[5:]}
    engine.store.evict([k for k in engine.store.objects if k.split(b":")[2] == b"1" and k.rsplit(b":", 1)[1] in names])
    counted = count_asking(engine)
    assert (counted["hit_tokens"], reasons(counted, "missed_tokens")) == (80, {"evicted": 16})


def test_below_min_hit_tokens(start):
    engine = stored(start, options={"min_hit_tokens": 97})
    assert reasons(count_asking(engine)) == {"below_min_hit_tokens": 1}


def test_unknown_and_then_breaker_open(start):
    engine = stored(start, options={"breaker_failures": 2, "breaker_cooldown_ms": 60000})
    engine.store.fail_keys("exists", lambda key: True, Result(Status.TRANSIENT))
    found = [reasons(count_asking(engine, f"b{i}")) for i in range(3)]
    assert found == [{"unknown": 1}, {"unknown": 1}, {"breaker_open": 1}]


def test_timeout(start):
    engine = stored(start, options={"lookup_timeout_ms": 60, "lookup_wait_ms": 1})
    engine.forget_local()
    gate = engine.store.close_gate("exists")
    counted = engine.count_metrics()
    engine.ask("b", PROMPT)
    gate.set()
    flush(engine)
    assert reasons(counted) == {"timeout": 1}
    assert reasons(counted, "missed_tokens") == {"timeout": 96}


def test_a_lookup_that_timed_out_is_in_the_histogram_with_its_age(start, monkeypatch):
    """Else the slowest lookups were the ones that it does not show."""
    engine = stored(start, options={"lookup_timeout_ms": 60, "lookup_wait_ms": 1})
    engine.forget_local()
    seen: list[float] = []
    monkeypatch.setattr(engine.pool.stats, "observe", lambda name, value: seen.append(value) if name == "lookup_seconds" else None)
    gate = engine.store.close_gate("exists")
    engine.ask("b", PROMPT)
    gate.set()
    (age,) = seen
    assert 0.06 <= age < 60
    engine.settle()


def test_a_failed_load_and_then_the_negative_cache(start):
    engine = stored(start, load_async=True, policy="recompute")
    engine.store.fail_keys("get", lambda key: True, Result(Status.TRANSIENT))
    engine.store.fail_keys("put", lambda key: True, Result(Status.NO_SPACE))
    counted = count_asking(engine)
    assert (counted["hits"], counted["hit_tokens"], counted["queried_tokens"]) == (1, 96, 96), "it was found"
    assert total(counted, "loaded_tokens") == 0, "and not loaded"
    assert reasons(counted) == {"load_failed": 1}
    assert counted["load_failures/reason=transient"] > 0
    assert reasons(count_asking(engine, "c")) == {"negative_cache": 1}


def test_workers_that_bypass_the_store_are_told_as_such(start):
    engine = stored(start)
    engine.pool._workers_down = True
    engine.forget_local()
    engine.pool._workers_down = True
    counted = engine.count_metrics()
    engine.ask("b", [t + 600 for t in PROMPT])
    assert reasons(counted) == {"breaker_open": 1}


def test_every_reason_that_is_counted_is_documented(start):
    """Whatever faults come: random ones at every call."""
    seen: set[str] = set()
    rng = random.Random(3)
    engine = start(policy="recompute", load_async=True, options={"breaker_failures": 3, "breaker_cooldown_ms": 20})
    statuses = [None, None, None, Result(Status.MISSING), Result(Status.TRANSIENT)]
    for i in range(40):
        rules = {op: rng.choice(statuses) for op in ("exists", "lease", "get", "put")}
        engine.store.rules = {op: (lambda key, r=r: r) for op, r in rules.items() if r is not None}
        counted = count_asking(engine, f"b{i}", [t + 40 * (i % 5) for t in PROMPT])
        seen |= set(reasons(counted)) | set(reasons(counted, "missed_tokens"))
        assert {split_name(k)[0] for k in counted if not k.startswith((GAUGE, SEEN))} <= set(METRICS)
    assert seen <= set(MISS_REASONS)
    assert {"absent", "unknown", "negative_cache"} <= seen


# ---- tiers ---------------------------------------------------------------------------------------------------------------------


def tiered(start, disk_from: int, **fields):
    engine = stored(start, **fields)
    far = {h.hex().encode() for h in engine.requests["a"].block_hashes[disk_from:]}
    engine.store.tier_of = lambda key: Tier.DISK if key.rsplit(b":", 1)[1] in far else Tier.DRAM
    return engine


@pytest.mark.parametrize("leases", [True, False])
@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"groups": HYBRID}], ids=["plain", "tp2", "hybrid"])
def test_hits_and_loads_by_tier(start, shape, leases):
    engine = tiered(start, 4, store=FakeStore(leases=leases), **shape)
    counted = count_asking(engine)
    assert engine.external["b"] == 96
    assert engine.sources == {"host": 64, "disk": 32}
    assert (counted["loaded_tokens/tier=dram"], counted["loaded_tokens/tier=disk"]) == (64, 32)
    size = len(next(iter(engine.store.objects.values())))
    by_tier = Counter()
    for key in engine.store.asked["get"]:
        by_tier[engine.store.tier_of(key).value] += size
    assert {t: counted[f"loaded_bytes/tier={t}"] for t in ("dram", "disk")} == dict(by_tier)
    assert sum(v for k, v in counted.items() if k.startswith("call_bytes/op=load")) == by_tier.total()
    engine.assert_clean()


def test_a_rank_that_reads_from_farther_off_decides(start):
    engine = stored(start, tp=2)
    engine.store.tier_of = lambda key: Tier.REMOTE if b":h1-1_" in key else Tier.DRAM
    count_asking(engine)
    assert engine.sources == {"p2p": 96}


def test_only_what_is_used_of_a_hit_is_told(start):
    """The engine holds 48 tokens by itself."""
    engine = tiered(start, 4)
    engine.forget_local()
    engine.sources.clear()
    engine.ask("local", PROMPT[:49])
    engine.sources.clear()
    engine.ask("b", PROMPT)
    assert engine.external["b"] == 48
    assert engine.sources == {"host": 16, "disk": 32}


def test_the_speed_of_a_tier_is_that_of_calls_that_met_only_it(start):
    engine = tiered(start, 4)
    counted = count_asking(engine)
    assert counted["call_bytes/op=load,tier=mixed"] == counted["loaded_bytes/tier=dram"] + counted["loaded_bytes/tier=disk"]
    assert "call_bytes/op=load,tier=disk" not in counted
    engine.store.tier_of = lambda key: Tier.DISK
    counted = count_asking(engine, "c")
    assert counted["call_bytes/op=load,tier=disk"] == counted["loaded_bytes/tier=disk"] > 0


def test_saved_tokens_are_those_that_all_ranks_have_stored(start):
    engine = start(tp=2)
    chain = engine.request("probe", PROMPT).block_hashes
    bad = chain[2].hex().encode()
    engine.store.fail_keys("put", lambda key: key.endswith(bad) and b":h1-1_" in key, Result(Status.NO_SPACE))
    counted = engine.count_metrics()
    engine.ask("a", PROMPT)
    flush(engine)
    assert counted["saved_tokens"] == 5 * 16
    assert total(counted, "saved_blocks") == 11
    assert counted["save_failures/reason=no_space"] == 1


# ---- gauges --------------------------------------------------------------------------------------------------------------------


def gauges_of(stats: PoolStats) -> dict[str, float]:
    return {k.removeprefix(GAUGE): v for k, v in stats.data.items() if k.startswith(GAUGE)}


def test_queues_and_breakers_have_gauges_that_go_back_to_zero(start):
    engine = start(options={"breaker_failures": 1, "breaker_cooldown_ms": 1})
    side = engine.ranks[0].worker_side
    gate = engine.store.close_gate("put")
    for i in range(3):
        engine.add(f"r{i}", [t + 150 * i for t in PROMPT], 4)
    for _ in range(6):
        engine.step()
    time.sleep(0.02)
    told = gauges_of(side.take_stats())
    assert told["queued_jobs/kind=save"] >= 1
    assert told["oldest_job_seconds/kind=save"] >= 0.02
    side._save_breaker.failure()
    assert gauges_of(side.take_stats())["breaker_state/kind=save"] == 2
    gate.set()
    engine.run()
    engine.settle()
    side._save_breaker.success()
    engine.ask("d", [7])
    assert set(side._told_gauges.values()) == {0}
    assert side.take_stats() is None, "nothing new: nothing to tell"


def test_over_ranks_counters_add_and_gauges_do_not():
    ranks = [PoolStats(), PoolStats()]
    for i, stats in enumerate(ranks):
        stats.add("saved_bytes/tier=dram", 100)
        stats.gauge("queued_jobs/kind=save", 3 + i)
        stats.observe("save_seconds", 0.5 + i)
    merged = ranks[0].aggregate(ranks[1])
    assert merged.data["saved_bytes/tier=dram"] == 200
    assert merged.data["gauge:queued_jobs/kind=save"] == 4
    assert merged.data["seen:save_seconds"] == [0.5, 1.5]
    assert merged.reduce()["save_seconds mean"] == 1.0


def test_the_store_is_asked_by_one_rank_and_not_on_the_engines_thread(start):
    store = FakeStore()
    asked, stats = [], store.stats
    import threading

    store.stats = lambda: asked.append(threading.current_thread().name) or stats()
    engine = start(store, tp=2)
    engine.until(lambda: asked.count("kvpool-store-gauges") == 1)
    engine.ask("a", PROMPT)
    engine.settle()
    assert asked.count("kvpool-store-gauges") == 1, "once in five seconds"
    told = gauges_of(engine.pool.take_stats() or PoolStats()) | {k: v for k, v in engine.metrics.items() if k.startswith(GAUGE)}
    assert any("store_capacity_bytes/tier=remote" in name for name in told)


def test_bc_116_store_gauges_stay_within_bounds_and_counters_never_fall(start):
    """Over put, evict, and a pool that was made anew."""
    from kvpool.engine.store_gauges import StoreGauges
    from kvpool.stores.base import StoreStats

    store = FakeStore()
    pictures = [(50, 5), (80, 9), (0, 0), (10, 2)]
    gauges, told = StoreGauges(store, seconds=3600), []
    gauges.close()
    for used, evicted in pictures:
        gauges._fresh = StoreStats(100, used, used, evicted)
        stats = PoolStats()
        gauges.tell(stats)
        told.append(stats.data)
        empty = PoolStats()
        gauges.tell(empty)
        assert empty.is_empty(), "a picture is told once"
    assert [t["store_evicted_objects/tier=remote"] for t in told] == [0, 4, 0, 2], "what came before this engine is not counted"
    assert all(0 <= t["gauge:store_used_bytes/tier=remote"] <= t["gauge:store_capacity_bytes/tier=remote"] for t in told)


def test_a_store_that_hangs_or_raises_tells_nothing_and_harms_nothing(start):
    from kvpool.engine.store_gauges import StoreGauges

    def broken():
        raise OSError("broken")

    store = FakeStore()
    store.stats = broken
    gauges = StoreGauges(store, seconds=0.001)
    time.sleep(0.01)
    stats = PoolStats()
    gauges.tell(stats)
    assert stats.is_empty()
    gauges.close()


# ---- their way to /metrics -----------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter():
    """Our metrics for two data-parallel engines, in a registry of their own."""
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    config = SimpleNamespace(kv_transfer_config=None)
    prom = PoolPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    return prom, registry


def test_all_that_a_run_counts_arrives_with_its_labels(start, exporter):
    prom, registry = exporter
    engine = tiered(start, 4)
    payloads = []
    take = engine._take
    engine._take = lambda outputs: (
        payloads.extend(b.scheduler_stats.kv_connector_stats for b in outputs.values() if b.scheduler_stats) or take(outputs)
    )
    counted = count_asking(engine)
    for payload in payloads:
        prom.observe(payload or {}, 1)
    value = registry.get_sample_value
    labels = {"model_name": "m", "engine": "1"}
    assert value("kvpool:loaded_tokens_total", {**labels, "tier": "disk"}) == counted["loaded_tokens/tier=disk"] == 32
    assert value("kvpool:hits_total", labels) == 1
    assert value("kvpool:lookup_seconds_count", labels) >= 1
    assert value("kvpool:call_seconds_count", {**labels, "op": "load", "tier": "mixed"}) == 1
    assert value("kvpool:breaker_state", {**labels, "kind": "save"}) == 0
    assert value("kvpool:hits_total", {**labels, "engine": "0"}) == 0, "the other engine has had none"
    assert value("kvpool:misses_total", {**labels, "engine": "0", "reason": "evicted"}) == 0, "but is there from the start"


def test_what_is_exported_is_what_the_table_says(exporter):
    prom, registry = exporter
    for metric in METRICS.values():
        labels = "/" + ",".join(f"{label}=x" for label in metric.labels) if metric.labels else ""
        prefix = {"gauge": GAUGE, "histogram": SEEN, "counter": ""}[metric.kind]
        prom.observe({f"{prefix}{metric.name}{labels}": [1.0] if metric.kind == "histogram" else 1.0})
    names = {sample.name for family in registry.collect() for sample in family.samples if not sample.name.endswith("_created")}
    assert names == {name for metric in METRICS.values() for name in metric.exported}
    prom.observe({"from_another_version": 1.0, "misses/reason=x": 1.0})
