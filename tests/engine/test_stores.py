"""The same three checks on every store behind a library: a GQA, an MLA and a sliding-window model, tokens as without the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.cases import Cell, cell_spec, check_cell
from tests.engine.runner import Engine, EngineSpec
from tests.stores.live import STORES, LiveStore, live_store

StartEngine = Callable[[EngineSpec], Engine]
CELLS = [
    Cell("qwen3", load_async=True, prefix_caching=True),
    Cell("mla", load_async=True, prefix_caching=False),
    Cell("gemma3", load_async=True, prefix_caching=True),
]


@pytest.fixture(scope="module", params=STORES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStore]:
    with live_store(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.model)
def test_tokens_with_the_pool_equal_those_without(live: LiveStore, cell: Cell, tmp_path: Path, start_engine: StartEngine) -> None:
    spec = live.spec(cell_spec(cell, tmp_path, negative_cache_ms=1))
    check_cell(start_engine(spec), cell, pool_is_filled=False, tries=3)


@pytest.mark.slow
def test_a_restarted_engine_hits(live: LiveStore, tmp_path: Path, start_engine: StartEngine) -> None:
    """What the first engine stored outlives it."""
    cell = Cell("qwen3", load_async=True, prefix_caching=True)
    spec = live.spec(cell_spec(cell, tmp_path, cache_namespace="restarted"))
    first = start_engine(spec)
    check_cell(first, cell, pool_is_filled=False, tries=3)
    first.close()
    check_cell(start_engine(spec), cell, pool_is_filled=True, tries=3)
