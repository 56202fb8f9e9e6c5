"""Prefill and decode as two real engines on one machine: outputs equal one engine's, and what dies takes nothing along."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engine.pairs import PairSpec, StartEngine, ask, cold, offer
from tests.engine.runner import Engine, metric, tokens

LENGTHS = (700, 512, 513, 40)
HOLD_S = 20


def prompts(seed: int) -> list[list[int]]:
    return [tokens((seed, 30), (seed + 1 + i, length - 30)) for i, length in enumerate(LENGTHS)]


def wake(prefill: Engine) -> None:
    assert let_go(prefill), "a block is still in use"


def let_go(prefill: Engine) -> bool:
    """An idle engine lets go of what has ended when it next does something."""
    prefill.do("wait_idle")
    prefill.generate([tokens((77, 20))], max_tokens=1)
    empty: bool = prefill.do("reset_prefix_cache")
    return empty


def check_exact(prefill: Engine, decode: Engine, seed: int) -> None:
    """Whole blocks, partial blocks, short prompts, one by one and two at once."""
    for number, prompt in enumerate(prompts(seed)):
        expected = cold(decode, prompt, f"cold-{seed}-{number}")
        result = ask(decode, prompt, offer(prefill, prompt))
        assert result["token_ids"] == expected, f"prompt of {len(prompt)} tokens"
        assert result["num_cached_tokens"] == len(prompt) - 1, "its KV came from elsewhere"
    pair = [tokens((seed + 50 + i, 300)) for i in range(2)]
    expected_pair = [cold(decode, p, f"pair-{seed}-{i}") for i, p in enumerate(pair)]
    offers = [offer(prefill, p) for p in pair]
    tickets = [decode.send("generate", prompts=[p], max_tokens=12, kv_transfer_params=o) for p, o in zip(pair, offers, strict=True)]
    assert [decode.receive(t, 60)[0]["token_ids"] for t in tickets] == expected_pair
    decode.do("wait_idle")
    wake(prefill)


CASES = {
    "qwen3": ("qwen3", {}, "process_vm"),
    "mla-tp2": ("mla", {"tensor_parallel_size": 2}, "process_vm"),
    "gemma3": ("gemma3", {}, "local_host"),
    "gemma3-tp2": ("gemma3", {"tensor_parallel_size": 2}, "process_vm"),
    "qwen3-pp2": ("qwen3", {"pipeline_parallel_size": 2, "enforce_eager": False}, "local_host"),
    "qwen3-mooncake": ("qwen3", {}, "mooncake"),
}
CI_CASES = ("qwen3-pp2",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in CI_CASES else pytest.mark.slow) for case in CASES])
def test_outputs_equal_one_engines(case: str, pool_root: Path, start_engine: StartEngine) -> None:
    model, prefill, engine = CASES[case]
    if engine == "mooncake":
        pytest.importorskip("mooncake.engine")
    check_exact(*PairSpec(model, pool_root, prefill=prefill, engine=engine).start(start_engine), seed=1000)


@pytest.mark.slow
def test_the_pool_before_the_transfer(pool_root: Path, start_engine: StartEngine) -> None:
    """The other order of the children; the order of a real pair in CI is the guides'."""
    spec = PairSpec("qwen3", pool_root, beside="first", consumer={"consumer_is_to_put": True})
    prefill, decode = spec.start(start_engine)
    check_exact(prefill, decode, seed=4000)
    check_second_turn(prefill, decode)


@pytest.mark.slow
def test_data_parallel_ranks_on_both_sides(pool_root: Path, start_engine: StartEngine) -> None:
    ranks = {"data_parallel_size": 2}
    prefill, decode = PairSpec("qwen3", pool_root, prefill=ranks, decode=ranks).start(start_engine)
    for number, (there, here) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        prompt = tokens((5000 + number, 400))
        expected = decode.generate([prompt], max_tokens=12, cache_salt="cold", dp_ranks=[here])[0]["token_ids"]
        result = ask(decode, prompt, offer(prefill, prompt, dp_ranks=[there]), dp_ranks=[here])
        assert result["token_ids"] == expected
        assert result["num_cached_tokens"] == len(prompt) - 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_pull_that_fails_ends_by_policy(policy: str, pool_root: Path, start_engine: StartEngine) -> None:
    prefill, decode = PairSpec("gemma3", pool_root, policy=policy, engine="process_vm").start(start_engine)
    prompt = tokens((1, 600))
    expected, orphaned = cold(decode, prompt, "cold"), offer(prefill, prompt)
    prefill.kill()
    result = ask(decode, prompt, orphaned)
    if policy == "recompute":
        assert result["token_ids"] == expected
    else:
        assert result["error"] or result["finish_reason"] == "error"
    assert ask(decode, prompt, None)["token_ids"] == expected, "the engine lives"


def test_a_pair_from_start_to_end(pool_root: Path, start_engine: StartEngine) -> None:
    """TP 2 -> 1 beside a pool: exact outputs, a second turn from the pool, aborts, kill -9 of decode, then of prefill."""
    spec = PairSpec(
        "qwen3",
        pool_root,
        prefill={"tensor_parallel_size": 2},
        beside="last",
        consumer={"consumer_is_to_put": True, "prefill_tp_size": 2},
        env={"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(HOLD_S)},
    )
    prefill, decode = spec.start(start_engine)
    check_exact(prefill, decode, seed=2000)
    check_second_turn(prefill, decode)
    check_aborts(prefill, decode)
    other = tokens((2, 500))
    expected, unread = cold(decode, other, "other"), offer(prefill, other)
    over = time.monotonic() + HOLD_S + 1
    decode.kill()
    again = start_engine(spec.spec("kv_consumer"))
    time.sleep(max(0.0, over - time.monotonic()))
    assert ask(again, other, unread)["token_ids"] == expected, "too late: computed, by policy"
    wake(prefill)
    third = tokens((3, 450))
    expected, served = cold(again, third, "third"), ask(again, third, offer(prefill, third))
    assert served["token_ids"] == expected
    assert served["num_cached_tokens"] == len(third) - 1, "a new decode engine is served"
    fourth = tokens((4, 450))
    expected, orphaned = cold(again, fourth, "fourth"), offer(prefill, fourth)
    prefill.kill()
    began = time.monotonic()
    assert ask(again, fourth, orphaned)["token_ids"] == expected, "computed, by policy"
    assert time.monotonic() - began < 55
    again.do("wait_idle")


def check_second_turn(prefill: Engine, decode: Engine) -> None:
    """What decode has generated and stored, cut into prefill's shards, is what prefill does not compute in the next turn."""
    first = tokens((3000, 600))
    answer = ask(decode, first, offer(prefill, first), max_tokens=50)["token_ids"]
    decode.do("wait_idle")
    second = [*first, *answer, *tokens((3001, 50))]
    expected = cold(decode, second, "second turn")
    wake(prefill)
    before = metric(prefill.metrics(), "kvpool:hit_tokens_total")
    assert ask(decode, second, offer(prefill, second))["token_ids"] == expected
    assert metric(prefill.metrics(), "kvpool:hit_tokens_total") - before == 640, "the block that decode filled was not found"


def check_aborts(prefill: Engine, decode: Engine) -> None:
    aborted = [tokens((10 + i, 400)) for i in range(4)]
    offers = [offer(prefill, p) for p in aborted]
    tickets = [
        decode.send("abort", prompts=[p], abort=[0], after_s=0.02 * i, max_tokens=8, kv_transfer_params=o)
        for i, (p, o) in enumerate(zip(aborted, offers, strict=True))
    ]
    for ticket in tickets:
        decode.receive(ticket, 60)
    prefill.do("abort", prompts=aborted, abort=[1, 3], after_s=0.05, max_tokens=8)
    decode.do("wait_idle")
    end = time.monotonic() + HOLD_S / 2
    while not let_go(prefill) and time.monotonic() < end:
        time.sleep(0.5)
    wake(prefill)
