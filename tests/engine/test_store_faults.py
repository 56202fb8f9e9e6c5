"""An engine whose store stops answering, or lies behind a link that is cut: the same answers in time, and hits again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import Cell, cell_spec
from tests.engine.runner import Engine, EngineSpec, tokens
from tests.hosts import Host, other_hosts
from tests.stopped import stopped
from tests.stores.live import STORES, LiveStore, far_store

StartEngine = Callable[[EngineSpec], Engine]
ANSWER_S = 45.0  # two requests whose every call to the store runs into its deadline, on a busy machine
RECOVERY_S = 90.0
HIT = 1280
FAULTS = ("stopped", "cut off")
UNFELT = {("yuanrong", "cut off")}
"""Its clients use the worker of their own host, by unix sockets and shared memory."""


@contextmanager
def fault(kind: str, live: LiveStore, host: Host) -> Iterator[None]:
    if kind == "stopped":
        with stopped(process.pid for process in live.started.processes):
            yield
        return
    host.cut()
    try:
        yield
    finally:
        host.mend()


def ask(engine: Engine, prompts: list[list[int]], **more: Any) -> tuple[list[list[int]], list[int]]:
    """The answers, one after the other, and how much of each prompt was cached; nothing on the device before the first."""
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache")
    answers = engine.generate(prompts, max_tokens=8, concurrent=False, **more)
    return [one["token_ids"] for one in answers], [one["num_cached_tokens"] or 0 for one in answers]


@pytest.mark.parametrize("backend", STORES)
def test_a_store_that_stops_or_is_cut_off_changes_no_answer(backend: str, tmp_path: Path, start_engine: StartEngine) -> None:
    with other_hosts(1) as (host,), far_store(backend, tmp_path / "service", host) as live:
        cell = Cell("qwen3", load_async=True, prefix_caching=True)
        engine = start_engine(
            live.spec(cell_spec(cell, tmp_path, negative_cache_ms=1, breaker_cooldown_ms=500, lookup_timeout_ms=1000))
        )
        prompts = [tokens((1, HIT), (seed, 60)) for seed in (2, 3)]
        expected, cached = ask(engine, prompts, cache_salt="alone")
        until_hits(engine, prompts, expected)
        for kind in FAULTS:
            with fault(kind, live, host):
                begun = time.monotonic()
                answers, cached = ask(engine, prompts)
                assert time.monotonic() - begun < ANSWER_S, kind
                assert answers == expected, kind
                assert cached[0] == 0 or (backend, kind) in UNFELT, f"{kind}: a store that does not answer gave a hit"
            until_hits(engine, prompts, expected)


def until_hits(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """By itself, and without a wrong token on the way."""
    end = time.monotonic() + RECOVERY_S
    while True:
        answers, cached = ask(engine, prompts)
        assert answers == expected
        if min(cached) >= HIT:
            return
        assert time.monotonic() < end, f"no hits: {cached}"
        engine.do("sleep", seconds=0.5)
