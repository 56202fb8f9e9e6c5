"""Prefill and decode in network namespaces of their own, joined by a link that is slow, then cut: two hosts, as TCP sees it."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.pairs import PairSpec, StartEngine, ask, cold, offer
from tests.engine.runner import Engine, EngineSpec, metric, tokens
from tests.stores.needs import lacking

HOSTS = {"kv_producer": "10.213.77.1", "kv_consumer": "10.213.77.2"}
HOLD_S = 20
PULL_S = 8
CALL_S = 70  # mooncake's call cannot be abandoned, and ends some 30 s after the last byte


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Link:
    """A veth pair between two namespaces."""

    def __init__(self, mark: str) -> None:
        self.spaces = {role: f"kvpool-{mark}-{i}" for i, role in enumerate(HOSTS)}
        self.ends = {role: f"kvp{mark}{i}" for i, role in enumerate(HOSTS)}

    def open(self) -> None:
        for space in self.spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        one, other = self.ends.values()
        ip("link", "add", one, "type", "veth", "peer", "name", other)
        for role, end in self.ends.items():
            ip("link", "set", end, "netns", self.spaces[role])
            ip("-n", self.spaces[role], "addr", "add", f"{HOSTS[role]}/24", "dev", end)
        self.set("up")

    def set(self, state: str) -> None:
        for role, end in self.ends.items():
            ip("-n", self.spaces[role], "link", "set", end, state)

    def slow_down(self, rate: str) -> None:
        role = "kv_producer"
        words = ["tc", "qdisc", "add", "dev", self.ends[role], "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        subprocess.run(["ip", "netns", "exec", self.spaces[role], *words], check=True, capture_output=True, timeout=60)

    def full_speed(self) -> None:
        role = "kv_producer"
        words = ["tc", "qdisc", "del", "dev", self.ends[role], "root"]
        subprocess.run(["ip", "netns", "exec", self.spaces[role], *words], check=True, capture_output=True, timeout=60)

    def close(self) -> None:
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=60)


@contextmanager
def linked() -> Iterator[Link]:
    link = Link(f"{time.time_ns() % 10**6:06}")
    try:
        try:
            link.open()
            link.slow_down("100mbit")
            link.full_speed()
        except (OSError, subprocess.SubprocessError) as error:
            lacking(f"needs network namespaces, veth and tc: {error}")
        yield link
    finally:
        link.close()


def spec_in(link: Link, pair: PairSpec, role: str) -> EngineSpec:
    spec = pair.spec(role)
    spec.prefix = ["ip", "netns", "exec", link.spaces[role]]
    spec.env |= {"VLLM_HOST_IP": HOSTS[role], "VLLM_LOOPBACK_IP": "127.0.0.1"}
    return spec


def holds_nothing(prefill: Engine) -> bool:
    prefill.generate([tokens((77, 20))], max_tokens=1)
    prefill.do("wait_idle")
    samples = prefill.metrics()
    return not sum(metric(samples, name) for name in ("kvpool:open_offers", "kvpool:offer_pinned_blocks"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_link_that_is_cut(policy: str, pool_root: Path, start_engine: StartEngine) -> None:
    """Before a pull, and in the middle of one: the request ends by policy, in time; well again when the link is."""
    if importlib.util.find_spec("mooncake") is None:
        lacking("needs Mooncake's transfer engine: pip install -r requirements/stores.txt")
    env = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(HOLD_S), "ASCEND_TRANSFER_TIMEOUT": str(PULL_S * 1000)}
    with linked() as link:
        pair = PairSpec("qwen3", pool_root, engine="mooncake", policy=policy, env=env)
        prefill, decode = (start_engine(spec_in(link, pair, role)) for role in HOSTS)
        prompts = [tokens((100 + i, 3000)) for i in range(4)]
        expected = [cold(decode, prompt, f"cold-{i}") for i, prompt in enumerate(prompts)]
        assert ask(decode, prompts[0], offer(prefill, prompts[0]))["token_ids"] == expected[0]
        assert metric(decode.metrics(), "kvpool:pulls_total", reason="ok") == 1

        link.slow_down("40mbit")  # 24 MB then take 5 s
        kept = offer(prefill, prompts[1])
        began = time.monotonic()
        ticket = decode.send("generate", prompts=[prompts[1]], max_tokens=12, kv_transfer_params=kept)
        time.sleep(1.5)
        link.set("down")
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

        link.full_speed()
        link.set("up")
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
