"""Prefill and decode in network namespaces of their own, joined by a link that is slow, then cut: two hosts, as TCP sees it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.pairs import PairSpec, StartEngine, ask, cold, offer
from tests.engine.runner import Engine, EngineSpec, metric, tokens
from tests.hosts import Host, other_hosts
from tests.stores.needs import lacking

HOLD_S = 20
PULL_S = 8
CALL_S = 70  # mooncake's call cannot be abandoned, and ends some 30 s after the last byte


def spec_on(host: Host, pair: PairSpec, role: str) -> EngineSpec:
    """The engine on that host."""
    spec = pair.spec(role)
    spec.prefix = host.prefix
    spec.env |= {"VLLM_HOST_IP": host.address, "VLLM_LOOPBACK_IP": "127.0.0.1"}
    return spec


def start_on(hosts: Sequence[Host], pair: PairSpec, start_engine: StartEngine) -> tuple[Engine, Engine]:
    """Prefill on the first, decode on the second, both at once."""
    specs = [spec_on(host, pair, role) for host, role in zip(hosts, ("kv_producer", "kv_consumer"))]
    with ThreadPoolExecutor(2) as pool:
        prefill, decode = pool.map(start_engine, specs)
    return prefill, decode


def holds_nothing(prefill: Engine) -> bool:
    prefill.generate([tokens((77, 20))], max_tokens=1)
    prefill.do("wait_idle")
    samples = prefill.metrics()
    return not sum(metric(samples, name) for name in ("kvpool:open_offers", "kvpool:offer_pinned_blocks"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # two starts and several deadlines, also on a busy machine
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_link_that_is_cut(policy: str, pool_root: Path, start_engine: StartEngine) -> None:
    """Before a pull, and in the middle of one: the request ends by policy, in time; well again when the link is."""
    if importlib.util.find_spec("mooncake") is None:
        lacking("needs Mooncake's transfer engine: pip install -r requirements/stores.txt")
    env = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(HOLD_S), "ASCEND_TRANSFER_TIMEOUT": str(PULL_S * 1000)}
    with other_hosts(2) as hosts:
        pair = PairSpec("qwen3", pool_root, engine="mooncake", policy=policy, env=env)
        prefill, decode = start_on(hosts, pair, start_engine)
        prompts = [tokens((100 + i, 3000)) for i in range(4)]
        expected = [cold(decode, prompt, f"cold-{i}") for i, prompt in enumerate(prompts)]
        assert ask(decode, prompts[0], offer(prefill, prompts[0]))["token_ids"] == expected[0]
        assert metric(decode.metrics(), "kvpool:pulls_total", reason="ok") == 1

        hosts[0].slow_down("40mbit")  # 24 MB then take 5 s
        kept = offer(prefill, prompts[1])
        began = time.monotonic()
        ticket = decode.send("generate", prompts=[prompts[1]], max_tokens=12, kv_transfer_params=kept)
        time.sleep(1.5)
        hosts[0].cut()
        assert_by_policy(decode.receive(ticket, 90)[0], policy, expected[1])
        assert time.monotonic() - began < CALL_S + PULL_S, "a call that is under way ends by the library's own deadline"
        assert metric(decode.metrics(), "kvpool:pulls_total", reason="failed") == 1, "the link was cut too late"

        unreached = offer(prefill, prompts[2])
        began = time.monotonic()
        assert_by_policy(ask(decode, prompts[2], unreached), policy, expected[2])
        assert time.monotonic() - began < 60, "an engine that cannot be reached is noticed by its silence"
        assert metric(decode.metrics(), "kvpool:pulls_total", reason="failed") == 2
        time.sleep(HOLD_S)
        assert holds_nothing(prefill), "what nobody could fetch is let go when its time is up"

        hosts[0].full_speed()
        hosts[0].mend()
        end = time.monotonic() + 60
        while ask(decode, prompts[3], offer(prefill, prompts[3]))["num_cached_tokens"] != len(prompts[3]) - 1:
            assert time.monotonic() < end, "the link is up, and nothing is transferred"
            decode.do("reset_prefix_cache")
            time.sleep(1.0)
        decode.do("wait_idle")
        assert cold(decode, prompts[3], "again") == expected[3]


def assert_by_policy(result: dict[str, object], policy: str, expected: list[int]) -> None:
    if policy == "recompute":
        assert result["token_ids"] == expected
    else:
        assert result["error"] or result["finish_reason"] == "error"
