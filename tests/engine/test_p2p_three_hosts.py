"""Prefill, decode and the pool's store each on a host of its own, the proxy on a fourth: one after another goes out of reach."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.front import Front, front
from tests.engine.pairs import PairSpec, StartEngine
from tests.engine.runner import Engine, EngineSpec, Prompt, metric, tokens
from tests.engine.test_p2p_network import holds_nothing, start_on
from tests.hosts import Host, other_hosts
from tests.stopped import stopped
from tests.stores.live import far_store
from tests.stores.needs import needs_mooncake
from tests.waiting import eventually

FIRST, ANSWER, BLOCK = 600, 50, 128
STORED = (FIRST + ANSWER) // BLOCK * BLOCK
IN_TIME_S = 45.0  # every call to the store may run into its deadline, on a busy machine
REFUSED_S = 30.0
BACK_S = 120.0
PREFILL_S = 12
POOL = {"load_async": True, "negative_cache_ms": 1, "breaker_cooldown_ms": 500}


@dataclass
class Talk:
    """Two turns, and what a plain engine answers to each."""

    prompts: list[Prompt]
    answers: list[list[int]]


@dataclass
class Site:
    prefill: Engine
    decode: Engine
    proxy: Front
    prefill_host: Host
    store_host: Host
    talks: Iterator[Talk]

    def ask(self, prompt: Prompt, expected: list[int], what: str) -> None:
        answered = self.proxy.ask(prompt, ANSWER)
        assert (answered.status, answered.error, answered.tokens) == (200, "", expected), what
        assert answered.seconds < IN_TIME_S, f"{what}: right, but after {answered.seconds:.0f} s"

    def pulls(self) -> float:
        return metric(self.decode.metrics(), "kvpool:pulls_total", reason="ok")

    def talk(self, what: str) -> tuple[float, float]:
        """A new conversation: right answers. Its pulls that went well, and the tokens of its second turn that prefill took from the
        pool: its own cache is emptied before."""
        talk, pulled = next(self.talks), self.pulls()
        self.ask(talk.prompts[0], talk.answers[0], f"{what}, first turn")
        for engine in (self.decode, self.prefill):
            engine.do("wait_idle", timeout_s=90)
        assert holds_nothing(self.prefill), what
        assert self.prefill.do("reset_prefix_cache"), what
        before = metric(self.prefill.metrics(), "kvpool:hit_tokens_total")
        self.ask(talk.prompts[1], talk.answers[1], f"{what}, second turn")
        return self.pulls() - pulled, metric(self.prefill.metrics(), "kvpool:hit_tokens_total") - before


def plain_talks(count: int, folder: Path) -> list[Talk]:
    talks = []
    with Engine(EngineSpec("qwen3"), folder) as plain:
        for seed in range(count):
            first = tokens((7000 + seed, FIRST))
            (answer,) = (one["token_ids"] for one in plain.generate([first], max_tokens=ANSWER))
            second = [*first, *answer, *tokens((7500 + seed, 50))]
            (after,) = (one["token_ids"] for one in plain.generate([second], max_tokens=ANSWER))
            talks.append(Talk([first, second], [answer, after]))
    return talks


@contextmanager
def site(root: Path, folder: Path, start_engine: StartEngine) -> Iterator[Site]:
    talks = iter(plain_talks(12, folder))
    with other_hosts(3) as (prefill_host, decode_host, store_host), far_store("mooncake", folder / "service", store_host) as store:
        pair = PairSpec(
            "qwen3",
            root,
            engine="mooncake",
            beside="last",
            backend="mooncake",
            consumer={"consumer_is_to_put": True},
            pool=POOL,
            env=store.started.env,
        )
        prefill, decode = start_on((prefill_host, decode_host), pair, start_engine)
        addresses = (prefill_host.address, decode_host.address)
        ports = [engine.do("serve", host=host) for engine, host in zip((prefill, decode), addresses)]
        flags = ("--connect-timeout", "3", "--prefill-timeout", str(PREFILL_S))
        with front(*ports, folder / "proxy.log", *flags, hosts=addresses) as proxy:
            yield Site(prefill, decode, proxy, prefill_host, store_host, talks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prefill_decode_and_store_on_hosts_of_their_own(pool_root: Path, tmp_path: Path, start_engine: StartEngine) -> None:
    needs_mooncake()
    with site(pool_root, tmp_path, start_engine) as here:
        assert here.talk("all are there") == (2, STORED)

        here.store_host.cut()
        pulls, hits = here.talk("the store is out of reach")
        assert (pulls, hits) == (2, 0), "the transfer needs no store, and a store that is out of reach gives no hits"

        prefill_is_out_of_reach(here)
        here.store_host.mend()
        here.prefill_host.mend()
        eventually(here.proxy.is_ready, "the proxy finds prefill again", REFUSED_S)
        eventually(lambda: holds_nothing(here.prefill), "prefill is told at last what nobody fetches", REFUSED_S)
        end = time.monotonic() + BACK_S
        while (last := here.talk("all are back")) != (2, STORED):
            assert time.monotonic() < end, f"all are back, but pulls and tokens from the pool are {last}"


def prefill_is_out_of_reach(here: Site) -> None:
    """From the middle of a request on, which ends in time with an error; what it has left on prefill stays there meanwhile. Decode
    serves what it is asked itself."""
    talk = next(here.talks)
    with stopped(here.prefill.processes().values()):
        request = here.proxy.start(talk.prompts[0], ANSWER)
        time.sleep(1.0)  # it waits in prefill's buffers
        here.prefill_host.cut()
    answered = request.result()
    assert answered.status in (502, 503, 504), answered
    assert answered.seconds < REFUSED_S, "prefill is out of reach, and the client waits"
    eventually(lambda: not holds_nothing(here.prefill), "prefill has computed it, for nobody")
    eventually(lambda: here.proxy.ask(talk.prompts[0]).status == 503, "the proxy has noticed", REFUSED_S)
    alone = here.decode.generate([talk.prompts[0]], max_tokens=ANSWER, timeout_s=IN_TIME_S)
    assert alone[0]["token_ids"] == talk.answers[0]
