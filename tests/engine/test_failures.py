"""Faults injected at every store call of a real engine: no wrong token, no hang, and the configured policy."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Cell, cell_spec, pool_config
from tests.engine.runner import Engine, EngineSpec, metric, tokens

StartEngine = Callable[[EngineSpec], Engine]
# Deadlines short enough to see them pass, a breaker that recovers within the test.
FAST = {
    "lookup_timeout_ms": 300,
    "load_timeout_ms": 1500,
    "save_timeout_ms": 1500,
    "lease_ms": 5000,
    "breaker_failures": 3,
    "breaker_cooldown_ms": 300,
    "negative_cache_ms": 1,
}
# Faults that must leave no trace in the output under `recompute`, whatever they hit.
FAULTS: dict[str, dict[str, Any]] = {
    "first block missing": {"get": {"status": "missing", "indexes": [0]}},
    "middle block missing": {"get": {"status": "missing", "indexes": [4]}},
    "last block missing": {"get": {"status": "missing", "indexes": [-1]}},
    "every get transient": {"get": {"status": "transient"}},
    "every get fatal": {"get": {"status": "fatal"}},
    "get raises": {"get": {"error": "broken"}},
    "get answers too few": {"get": {"result_change": -1}},
    "get answers too many": {"get": {"result_change": 1}},
    "get hangs": {"get": {"hang": True}},
    "get is slow": {"get": {"delay_s": 0.2}},
    "lookup unknown": {"exists": {"unknown": True}},
    "lookup raises": {"exists": {"error": "broken"}},
    "lookup answers too few": {"exists": {"result_change": -1}},
    "lookup is slow": {"exists": {"delay_s": 0.05}},
    "lookup hangs": {"exists": {"hang": True}},
    "lease unknown": {"lease": {"unknown": True}},
    "lease raises": {"lease": {"error": "broken"}},
    "put no space": {"put": {"full": True}},
    "put transient": {"put": {"status": "transient"}},
    "put raises": {"put": {"error": "broken"}},
    "put hangs": {"put": {"hang": True}},
    "put loses": {"put": {"lose": True}},
    "some gets fail": {"get": {"status": "transient", "fraction": 0.3}},
    "release raises": {"release": {"error": "broken"}},
    "release hangs": {"release": {"hang": True}},
    "stats hangs": {"stats": {"hang": True}},
    "health raises": {"get": {"status": "transient"}, "health": {"error": "broken"}},
    "health hangs": {"get": {"status": "transient"}, "health": {"hang": True}},
}
# What the first request makes the engine ask: all of it fails at once, in one engine raising, in the other hanging.
AT_FIRST = ("notes", "write_note", "stats")
FIRST_FAULT: dict[str, dict[str, Any]] = {"qwen3": {"error": "broken"}, "gemma3": {"hang": True}}
GAUGES_S = 5.0  # how often the store's numbers are read: kvpool.engine.store_gauges.SECONDS
COOLDOWN_S = 0.4  # of the breakers, and a little
LATE = {"abandonable": False, "calls": {"get": {"late_s": 1.0}}}


class Faults:
    """The plan file of an engine."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine, self._path = engine, path

    def set(self, calls: dict[str, Any], **more: Any) -> None:
        self._engine.do("write_file", path=str(self._path), text=json.dumps({"calls": calls, **more}))

    def clear(self) -> None:
        self.set({})


def _start(cell: Cell, root: Path, start_engine: StartEngine, **extra: Any) -> tuple[Engine, Faults]:
    plan = root / "faults.json"
    engine = start_engine(cell_spec(cell, root, fault_plan_path=str(plan), **{**FAST, **extra}))
    return engine, Faults(engine, plan)


def _prompt(number: int) -> list[int]:
    return tokens((100 + number, 900), (200 + number, 60))


def _ask(engine: Engine, number: int, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = engine.generate([_prompt(number)], max_tokens=8, timeout_s=90, **more)[0]
    return result


def _cold(engine: Engine, number: int) -> list[int]:
    """The tokens as computed without the pool."""
    expected: list[int] = _ask(engine, number, cache_salt=f"cold-{number}")["token_ids"]
    return expected


def _warm(engine: Engine, number: int) -> list[int]:
    """Store a prompt; return its tokens as computed without the pool."""
    expected = _cold(engine, number)
    assert _ask(engine, number)["token_ids"] == expected
    engine.do("wait_idle")
    engine.do("reset_prefix_cache")
    return expected


def _until_met(engine: Engine, number: int, calls: dict[str, Any], expected: list[int]) -> None:
    """Some calls are made only now and then: gauges are read every few seconds, health when a breaker is open."""
    if "stats" in calls:
        time.sleep(GAUGES_S + COOLDOWN_S)
    if "health" in calls:
        for _ in range(10):
            assert _ask(engine, number)["token_ids"] == expected
            engine.do("wait_idle")
            engine.do("reset_prefix_cache")
            if metric(engine.metrics(), "kvpool:breaker_state", kind="load") > 0:
                break
        time.sleep(COOLDOWN_S)


@pytest.mark.parametrize("cell", [Cell("qwen3", load_async=True), Cell("gemma3", load_async=True)], ids=str)
def test_every_fault_leaves_the_output_as_it_is(cell: Cell, pool_root: Path, start_engine: StartEngine) -> None:
    engine, faults = _start(cell, pool_root, start_engine, zero_hit_alarm_lookups=1)
    faults.set(dict.fromkeys(AT_FIRST, FIRST_FAULT[cell.model]))
    first = _ask(engine, 80)
    faults.clear()
    engine.do("wait_idle")
    time.sleep(COOLDOWN_S)
    assert first["token_ids"] == _cold(engine, 80), "faults of the first request"
    for number, (name, calls) in enumerate(FAULTS.items()):
        # A fault of a put is met by what is not stored yet, one of a get by what is.
        expected = _cold(engine, number) if "put" in calls else _warm(engine, number)
        faults.set(calls)
        _until_met(engine, number, calls, expected)
        began = time.monotonic()
        result = _ask(engine, number)
        assert result["token_ids"] == expected, name
        assert result["error"] is None, name
        assert time.monotonic() - began < 45, f"{name}: took {time.monotonic() - began:.1f} s"
        if "health" in calls:
            assert metric(engine.metrics(), "kvpool:breaker_state", kind="load") > 0, f"{name}: the breaker has closed"
        faults.clear()
        engine.do("wait_idle")
        engine.do("reset_prefix_cache")
        assert _ask(engine, number)["token_ids"] == expected, f"after {name}"
        time.sleep(COOLDOWN_S)
    assert "kvpool: no hit in " in engine.log_path.read_text(), "the alarm asks for notes and stats, and comes without them"
    samples = engine.metrics()
    assert metric(samples, "kvpool:load_failures_total") > 0
    assert metric(samples, "kvpool:save_failures_total") > 0
    assert metric(samples, "kvpool:misses_total", reason="unknown") > 0
    assert metric(samples, "kvpool:misses_total", reason="timeout") > 0
    # Well again: what is stored now is a hit now. On a busy machine one of the short deadlines may pass once more.
    for number in range(90, 100):
        expected = _warm(engine, number)
        result = _ask(engine, number)
        assert result["token_ids"] == expected
        if (result["num_cached_tokens"] or 0) >= 896:
            break
    else:
        pytest.fail("no hits after the faults")


def test_late_writes_reach_nobody(pool_root: Path, start_engine: StartEngine) -> None:
    """Overdue reads that land later: the request is recomputed elsewhere at once, the late bytes land in blocks still pinned."""
    engine, faults = _start(Cell("qwen3", load_async=True), pool_root, start_engine)
    expected = {n: _warm(engine, n) for n in range(3)}
    faults.set(LATE["calls"], abandonable=False)  # type: ignore[arg-type]
    assert _ask(engine, 0)["token_ids"] == expected[0]
    # The late bytes of the first request land while these are computed.
    for n in (1, 2):
        assert _ask(engine, n)["token_ids"] == expected[n]
    faults.clear()
    engine.do("wait_idle")
    for n in range(3):
        engine.do("reset_prefix_cache")
        assert _ask(engine, n)["token_ids"] == expected[n]


def test_policy_fail_ends_the_request_and_nothing_else(pool_root: Path, start_engine: StartEngine) -> None:
    engine, faults = _start(
        Cell("qwen3", load_async=False),
        pool_root,
        start_engine,
        kv_load_failure_policy="fail",
        lookup_timeout_ms=20_000,
        breaker_failures=1000,  # each fault is to be met, not bypassed
    )
    gets = {name: calls for name, calls in FAULTS.items() if calls.keys() == {"get"}}
    for n, (name, calls) in enumerate(gets.items()):
        expected = _warm(engine, n)
        faults.set(calls)
        result = _ask(engine, n)
        failed = bool(result["error"]) or result["finish_reason"] == "error"
        if "fraction" not in calls["get"]:  # else chance decides
            assert failed == (name != "get is slow"), name
        assert failed or result["token_ids"] == expected, name
        faults.clear()
        time.sleep(0.8)
        engine.do("reset_prefix_cache")
        assert _ask(engine, n)["token_ids"] == expected, f"after {name}"


def test_bc_048_chunked_prefill_under_pressure_with_preemption(pool_root: Path, start_engine: StartEngine) -> None:
    """Many prompts at once, prefilled in chunks, in too few blocks: every output as without the pool, saves and hits included."""
    args = {
        "kv_transfer_config": pool_config(pool_root, "pressure", save_decode_cache=True),
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 40,
        "block_size": 32,
        "max_num_seqs": 6,
        "max_model_len": 1024,
    }
    engine = start_engine(EngineSpec(model="qwen3", args=args))
    prompts = [tokens((1, 200), (10 + i, 150)) for i in range(6)]
    expected = [
        engine.generate([p], max_tokens=60, cache_salt=f"alone-{i}", timeout_s=60)[0]["token_ids"] for i, p in enumerate(prompts)
    ]
    for _ in range(2):
        results = engine.generate(prompts, max_tokens=60, timeout_s=120)
        assert [r["token_ids"] for r in results] == expected
        engine.do("wait_idle")
        engine.do("reset_prefix_cache")
    samples = engine.metrics()
    assert metric(samples, "vllm:num_preemptions_total") > 0, "the test did not cause preemption"
    assert metric(samples, "kvpool:hit_tokens_total") > 0
    assert metric(samples, "kvpool:pinned_blocks") == 0


def test_bc_061_aborts_and_a_signal_leave_nothing_behind(pool_root: Path, start_engine: StartEngine) -> None:
    engine, faults = _start(Cell("qwen3", load_async=True), pool_root, start_engine)
    expected = {n: _warm(engine, n) for n in range(4)}
    faults.set({"get": {"delay_s": 0.3}, "put": {"delay_s": 0.2}})
    prompts = [_prompt(n) for n in range(4)] + [tokens((900 + n, 600)) for n in range(4)]
    for by_cancel in (False, True):
        engine.do("abort", prompts=prompts, abort=list(range(8)), after_s=0.1, by_cancel=by_cancel)
        engine.do("abort", prompts=prompts, abort=[0, 2, 5, 7], after_s=0.0, after_tokens=2, max_tokens=8, by_cancel=by_cancel)
    faults.clear()
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache"), "a block is still in use"
    for n in range(4):
        assert _ask(engine, n)["token_ids"] == expected[n]
    faults.set({"get": {"delay_s": 0.2}, "exists": {"delay_s": 0.2}})
    engine.send("generate", prompts=prompts, max_tokens=400)
    time.sleep(0.5)
    began = time.monotonic()
    engine.signal(signal.SIGINT)
    assert not engine.close(timeout_s=90), "a process outlived SIGINT"
    assert time.monotonic() - began < 90, "vLLM alone needs 5 s, and more than 10 on a busy machine"
