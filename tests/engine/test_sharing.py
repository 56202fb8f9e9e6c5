"""Several engines and several connectors: one pool, one killed, one that cannot share, and children of a MultiConnector."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.engine.cases import Cell, cell_spec, pool_config
from tests.engine.runner import Engine, EngineSpec, metric, tokens
from tests.waiting import eventually

StartEngine = Callable[[EngineSpec], Engine]


def _outputs(engine: Engine, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    return [r["token_ids"] for r in engine.generate(prompts, max_tokens=8, concurrent=False, **more)]


def test_two_engines_share_a_pool_and_one_is_killed(pool_root: Path, start_engine: StartEngine) -> None:
    """Whatever the same lookup_rpc_port says, two engines of a host share; a kill -9 in mid-save harms nobody else."""
    specs = [cell_spec(Cell("qwen3"), pool_root, lookup_rpc_port="0") for _ in range(2)]
    first, second = start_engine(specs[0]), start_engine(specs[1])
    prompts = [tokens((n, 700)) for n in range(1, 7)]
    expected = _outputs(second, prompts, cache_salt="alone")
    assert _outputs(first, prompts[:3]) == expected[:3]
    first.do("wait_idle")
    shared = second.generate(prompts[:3], max_tokens=8, concurrent=False)
    assert [r["token_ids"] for r in shared] == expected[:3]
    assert all(r["num_cached_tokens"] >= 640 for r in shared)
    first.send("generate", prompts=[tokens((50 + n, 3000)) for n in range(8)], max_tokens=64)
    time.sleep(1.0)
    first.kill()
    assert _outputs(second, prompts) == expected
    second.do("wait_idle")
    assert second.do("reset_prefix_cache")
    assert _outputs(second, prompts) == expected


def test_bc_009_an_engine_that_cannot_share_is_told_why(pool_root: Path, start_engine: StartEngine) -> None:
    """Another hash seed: nothing hits, and the one warning names the field that differs."""
    writer = start_engine(cell_spec(Cell("qwen3"), pool_root))
    prompts = [tokens((n, 300)) for n in range(1, 4)]
    writer.generate(prompts, max_tokens=2)
    writer.do("wait_idle")
    writer.close()
    spec = cell_spec(Cell("qwen3", prefix_caching=False), pool_root, zero_hit_alarm_lookups=3)
    spec.env["PYTHONHASHSEED"] = "7"
    reader = start_engine(spec)
    assert all(not r["num_cached_tokens"] for r in reader.generate(prompts, max_tokens=2))
    warned = lambda: [line for line in reader.log_path.read_text().splitlines() if "no hit in" in line]  # noqa: E731
    eventually(warned, "a warning")
    reader.do("sleep", seconds=1.0)
    warnings = warned()
    assert len(warnings) == 1
    assert "hash_probe" in warnings[0]
    assert "ours" in warnings[0]


class Subscriber:
    """Hears the KV events of an engine, as a router would."""

    def __init__(self, folder: Path) -> None:
        self.config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events", "topic": ""}
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(str(self.config["endpoint"]))

    def take(self, seconds: float = 4.0) -> list[dict[str, Any]]:
        """All events of the pool that have come, once it has been silent for a while."""
        events: list[dict[str, Any]] = []
        while self._socket.poll(int(seconds * 1000)):
            _, _, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload)[1]
        return [event for event in events if event.get("medium") == "CPU"]


def test_bc_183_bc_185_reset_empties_our_namespace_only(pool_root: Path, tmp_path: Path, start_engine: StartEngine) -> None:
    subscriber = Subscriber(tmp_path)
    spec = cell_spec(Cell("qwen3"), pool_root)
    spec.args["kv_events_config"] = subscriber.config
    engine = start_engine(spec)
    prompts = [tokens((n, 500)) for n in range(1, 4)]
    expected = _outputs(engine, prompts, cache_salt="alone")
    subscriber.take()
    assert _outputs(engine, prompts) == expected
    engine.do("wait_idle")
    told = subscriber.take()
    assert {event["type"] for event in told} == {"BlockStored"}
    size = told[0]["block_size"]
    assert sorted(tuple(event["token_ids"]) for event in told) == sorted(
        tuple(prompt[i * size : (i + 1) * size]) for prompt in prompts for i in range(500 // size)
    )
    known = {event["block_hashes"][0] for event in told}
    assert all((event["parent_block_hash"] in known) == (event["token_ids"][0] not in [p[0] for p in prompts]) for event in told)
    samples = engine.metrics()
    assert metric(samples, "kvpool:kv_events_total", kind="stored") >= len(told)
    assert metric(samples, "kvpool:store_capacity_bytes", tier="dram") == 512 << 20
    assert metric(samples, "kvpool:saved_bytes_total", tier="dram") > 0
    assert metric(samples, "kvpool:save_seconds_count") > 0
    assert metric(samples, "kvpool:misses_total", reason="absent") >= 6
    # While the saves of this one are still under way, or just done: the reset must not care.
    engine.generate([tokens((77, 2000))], max_tokens=1)
    engine.do("reset_prefix_cache", reset_connector=True)
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache", reset_connector=True)
    before = metric(engine.metrics(), "kvpool:hit_tokens_total")
    again = engine.generate(prompts, max_tokens=8, concurrent=False)
    assert [r["token_ids"] for r in again] == expected
    assert all(not r["num_cached_tokens"] for r in again), "a hit on what was stored before the reset"
    assert metric(engine.metrics(), "kvpool:hit_tokens_total") == before
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache")
    assert all(r["num_cached_tokens"] >= 384 for r in engine.generate(prompts, max_tokens=8, concurrent=False))
    samples = engine.metrics()
    loaded = metric(samples, "kvpool:loaded_tokens_total", tier="dram")
    assert loaded == metric(samples, "vllm:prompt_tokens_cached_by_source_total", source="host") > 0
    assert metric(samples, "kvpool:call_seconds_sum", op="load", tier="dram") > 0


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])
def test_child_of_a_multiconnector(ours_first: bool, pool_root: Path, tmp_path: Path, start_engine: StartEngine) -> None:
    """Beside a stock child, in both orders; whoever is first and has the prompt loads it, both save."""
    ours = pool_config(pool_root, "multi")
    del ours["kv_load_failure_policy"]
    stock = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stock")},
    }
    children = [ours, stock] if ours_first else [stock, ours]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    engine = start_engine(EngineSpec(model="qwen3", args={"kv_transfer_config": config}))
    prompts = [tokens((1, 640), (n, 90)) for n in (2, 3)]
    expected = _outputs(engine, prompts)  # cold: nothing is stored yet (the stock child would not care about a salt)
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache")
    for _ in range(2):
        assert _outputs(engine, prompts) == expected
        engine.do("wait_idle")
        assert engine.do("reset_prefix_cache")
    samples = engine.metrics()
    assert metric(samples, "kvpool:saved_blocks_total") > 0
    assert (metric(samples, "kvpool:loaded_blocks_total") > 0) or not ours_first
    assert metric(samples, "kvpool:pinned_blocks") == 0
