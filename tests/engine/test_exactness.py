"""With the pool, tokens equal those without it, on real engines in every mode."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from tests.conftest import SHARED_MEMORY
from tests.engine.cases import CI_CELLS, Cell, all_cells, cell_spec, check_cell
from tests.engine.runner import Engine, EngineSpec
from tests.engine.spoiled import spoiled

StartEngine = Callable[[EngineSpec], Engine]


@pytest.fixture(scope="module")
def shared_root() -> Iterator[Path]:
    """Pools that outlive one test: a later engine, in another process and mode, hits what an earlier one stored."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-matrix-", dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _check(cell: Cell, root: Path, start_engine: StartEngine) -> None:
    filled = (root / cell.pool).exists()
    check_cell(start_engine(cell_spec(cell, root)), cell, filled, spoil=spoiled(root, cell.pool))


@pytest.mark.parametrize("cell", CI_CELLS, ids=str)
def test_tokens_with_the_pool_equal_those_without(cell: Cell, shared_root: Path, start_engine: StartEngine) -> None:
    _check(cell, shared_root, start_engine)


@pytest.mark.slow
@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_whole_matrix(cell: Cell, shared_root: Path, start_engine: StartEngine) -> None:
    _check(cell, shared_root, start_engine)


def test_the_covering_set_covers() -> None:
    """Every pair of values that some possible cell has is in one cell of the set."""
    names = [f.name for f in fields(Cell)]

    def pairs(cell: Cell) -> set[tuple[object, ...]]:
        return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in itertools.combinations(names, 2)}

    covered = set().union(*map(pairs, CI_CELLS))
    possible = set().union(*map(pairs, all_cells()))
    missing = sorted(map(str, possible - covered))
    # A pair of model and sharding is two starts more each; the whole matrix has them all.
    assert [m for m in missing if "'model'" not in m or "'parallel'" not in m] == []
