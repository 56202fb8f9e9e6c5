"""Engines that are closed after each test; what a test leaves behind fails it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.harness import Harness
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
