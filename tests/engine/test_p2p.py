"""Prefill and decode as two real engines on one machine: outputs equal one engine's, and nothing that dies takes the other along."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engine.pairs import PairSpec, StartEngine, ask, cold, offer
from tests.engine.runner import Engine, metric, tokens

LENGTHS = (700, 512, 513, 40)


def prompts(seed: int) -> list[list[int]]:
    return [tokens((seed, 30), (seed + 1 + i, length - 30)) for i, length in enumerate(LENGTHS)]


def check_exact(prefill: Engine, decode: Engine, seed: int) -> None:
    """Whole blocks, partial blocks, short prompts, one by one and all at once."""
    for number, prompt in enumerate(prompts(seed)):
        expected = cold(decode, prompt, f"cold-{seed}-{number}")
        result = ask(decode, prompt, offer(prefill, prompt))
        assert result["token_ids"] == expected, f"prompt of {len(prompt)} tokens"
        assert result["num_cached_tokens"] == len(prompt) - 1, "its KV came from elsewhere"
    first, second = (tokens((seed + 50 + i, 300)) for i in range(2))
    expected = [cold(decode, p, f"pair-{seed}-{i}") for i, p in enumerate((first, second))]
    offers = [offer(prefill, p) for p in (first, second)]
    tickets = [
        decode.send("generate", prompts=[p], max_tokens=12, kv_transfer_params=o) for p, o in zip((first, second), offers, strict=True)
    ]
    assert [decode.receive(t, 60)[0]["token_ids"] for t in tickets] == expected
    for engine in (prefill, decode):
        engine.do("wait_idle")
    prefill.generate([tokens((seed + 99, 20))], max_tokens=1)  # an idle engine lets go when it next does something
    assert prefill.do("reset_prefix_cache"), "a block is still in use"


CASES = {
    "mla-tp2": ("mla", {"tensor_parallel_size": 2}, "process_vm"),
    "gemma3": ("gemma3", {}, "local_host"),
    "gemma3-tp2": ("gemma3", {"tensor_parallel_size": 2}, "process_vm"),
    "qwen3-pp2": ("qwen3", {"pipeline_parallel_size": 2, "enforce_eager": False}, "local_host"),
    "qwen3-mooncake": ("qwen3", {}, "mooncake"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_one_engines(case: str, pool_root: Path, start_engine: StartEngine) -> None:
    model, prefill, engine = CASES[case]
    if engine == "mooncake":
        pytest.importorskip("mooncake.engine")
    check_exact(*PairSpec(model, pool_root, prefill=prefill, engine=engine).start(start_engine), seed=1000)


def test_multi_connector_with_unequal_tensor_parallel_sizes(pool_root: Path, start_engine: StartEngine) -> None:
    """TP 2 -> 1; prefill saves to and loads from the pool, decode receives, the second turn's prefix is served from the pool."""
    spec = PairSpec("qwen3", pool_root, prefill={"tensor_parallel_size": 2}, beside="last", consumer={"consumer_is_to_put": True})
    prefill, decode = spec.start(start_engine)
    check_exact(prefill, decode, seed=2000)
    first = tokens((3000, 600))
    answer = ask(decode, first, offer(prefill, first), max_tokens=40)["token_ids"]
    for engine in (prefill, decode):
        engine.do("wait_idle")
    second = [*first, *answer, *tokens((3001, 50))]
    expected = cold(decode, second, "second turn")
    prefill.generate([tokens((3002, 20))], max_tokens=1)
    assert prefill.do("reset_prefix_cache")
    before = metric(prefill.metrics(), "kvpool:hit_tokens_total")
    result = ask(decode, second, offer(prefill, second))
    assert result["token_ids"] == expected
    assert metric(prefill.metrics(), "kvpool:hit_tokens_total") - before >= 512, "the pool served nothing"


def test_what_is_killed_takes_nothing_along(pool_root: Path, start_engine: StartEngine) -> None:
    """kill -9 of decode, of prefill, aborts on both: the other goes on, blocks come back, outputs are right or by policy."""
    env = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "4"}
    spec = PairSpec("qwen3", pool_root, engine="process_vm", env=env)
    prefill, decode = spec.start(start_engine)
    prompt, other = tokens((1, 600)), tokens((2, 500))
    expected = {tuple(p): cold(prefill, p, f"cold-{len(p)}") for p in (prompt, other)}
    unread = offer(prefill, other)
    assert ask(decode, prompt, offer(prefill, prompt))["token_ids"] == expected[tuple(prompt)]
    aborted = [tokens((10 + i, 400)) for i in range(4)]
    decode.do("abort", prompts=aborted, abort=[0, 2], after_s=0.05, max_tokens=8)
    prefill.do("abort", prompts=aborted, abort=[1, 3], after_s=0.05, max_tokens=8)
    decode.kill()
    time.sleep(4.2)
    prefill.generate([tokens((20, 20))], max_tokens=1)
    assert prefill.do("reset_prefix_cache"), "blocks of a decode engine that is dead are still held"
    again = start_engine(spec.spec("kv_consumer"))
    assert ask(again, other, unread)["token_ids"] == expected[tuple(other)], "too late: computed, by policy"
    late = ask(again, prompt, offer(prefill, prompt))
    assert late["token_ids"] == expected[tuple(prompt)]
    assert late["num_cached_tokens"] == len(prompt) - 1, "a new decode engine is served"
    third = tokens((3, 450))
    expected_third, orphaned = cold(prefill, third, "third"), offer(prefill, third)
    prefill.kill()
    began = time.monotonic()
    assert ask(again, third, orphaned)["token_ids"] == expected_third, "computed, by policy"
    assert time.monotonic() - began < 30
    again.do("wait_idle")
