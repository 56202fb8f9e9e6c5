"""An engine whose store stops answering, or lies behind a link that is cut: the same answers in time, and hits again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.ops.services import processes, service
from tests.ascend_stand_in.staged import StagedMemcacheService
from tests.engine.cases import Cell, cell_spec
from tests.engine.runner import Engine, EngineSpec, tokens
from tests.stores.live import DRAM, NEEDS, START_S, STOP_S, STORES, LiveStore
from tests.two_hosts import Link, another_host

StartEngine = Callable[[EngineSpec], Engine]
ANSWER_S = 45.0  # two requests whose every call to the store runs into its deadline, on a busy machine
RECOVERY_S = 90.0
HIT = 1280
FAULTS = ("stopped", "cut off")
UNFELT = {("yuanrong", "cut off")}
"""Its clients use the worker of their own host, by unix sockets and shared memory."""


@contextmanager
def far_store(backend: str, folder: Path, link: Link) -> Iterator[LiveStore]:
    """The service of a store on the other host."""
    NEEDS[backend]()
    if backend == "memcache":
        folder.mkdir()
        staged = StagedMemcacheService(folder, DRAM, link.far, link.prefix)
        started = staged.start(folder, START_S)
        try:
            yield LiveStore(backend, started, staged.prefix)
        finally:
            staged.stop(folder, STOP_S)
        return
    arguments = ["store", "start", backend, "--host", link.far, "--folder", str(folder), "--dram", f"{DRAM >> 20}MB"]
    command = [*link.prefix, sys.executable, "-c", "from kvpool.cli import app; app()", *arguments]
    subprocess.run(command, check=True, timeout=START_S)
    started = processes.load(folder)
    assert started is not None
    try:
        yield LiveStore(backend, started)
    finally:
        service(backend).stop(folder, STOP_S)


@contextmanager
def fault(kind: str, live: LiveStore, link: Link) -> Iterator[None]:
    if kind == "cut off":
        link.cut()
        try:
            yield
        finally:
            link.mend()
        return
    for process in live.started.processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in live.started.processes:
            os.kill(process.pid, signal.SIGCONT)


def ask(engine: Engine, prompts: list[list[int]], **more: Any) -> tuple[list[list[int]], list[int]]:
    """The answers, one after the other, and how much of each prompt was cached; nothing on the device before the first."""
    engine.do("wait_idle")
    assert engine.do("reset_prefix_cache")
    answers = engine.generate(prompts, max_tokens=8, concurrent=False, **more)
    return [one["token_ids"] for one in answers], [one["num_cached_tokens"] or 0 for one in answers]


@pytest.mark.parametrize("backend", STORES)
def test_a_store_that_stops_or_is_cut_off_changes_no_answer(backend: str, tmp_path: Path, start_engine: StartEngine) -> None:
    with another_host() as link, far_store(backend, tmp_path / "service", link) as live:
        cell = Cell("qwen3", load_async=True, prefix_caching=True)
        engine = start_engine(
            live.spec(cell_spec(cell, tmp_path, negative_cache_ms=1, breaker_cooldown_ms=500, lookup_timeout_ms=1000))
        )
        prompts = [tokens((1, HIT), (seed, 60)) for seed in (2, 3)]
        expected, cached = ask(engine, prompts, cache_salt="alone")
        until_hits(engine, prompts, expected)
        for kind in FAULTS:
            with fault(kind, live, link):
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
