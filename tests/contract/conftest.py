"""Engines that are closed after each test; what a test leaves behind fails it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import Harness
from tests.contract.pair import Half, Pair, make_pair
from tests.contract.spec import Spec


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    """Start engines: ``start(store=…, tp=2, …)`` takes the fields of ``Spec``."""
    engines: list[Harness] = []

    def make(store: Any = None, **fields: Any) -> Harness:
        engines.append(Harness(Spec(**fields), store))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(pool_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    """Start pairs: ``pair("local_host", {prefill's Spec fields}, {decode's}, common=...)``."""
    monkeypatch.setenv("KVPOOL_SECRET", "a secret of tests")
    for name in ("VLLM_HOST_IP", "HCCL_IF_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "8000")
    halves: list[Half] = []

    def start(spec: Spec, store: Any) -> Half:
        halves.append(Half(spec, store))
        return halves[-1]

    def make(
        engine: str = "local_host", prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **common: Any
    ) -> Pair:
        return make_pair(pool_root, start, engine, prefill or {}, decode or {}, **common)

    yield make
    for half in halves:
        half.close()


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """vLLM's loggers do not propagate."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog
