"""`kvpool size` against real engines: the bytes that it predicts from config.json are those that vLLM allocates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.ops.sizing.kv_cache import engine_block_bytes, groups, kv_bytes
from kvpool.ops.sizing.model import model_shape
from kvpool.ops.sizing.model_file import read_model
from kvpool.ops.sizing.plan import Plan
from tests.engine.cases import Cell, cell_spec
from tests.engine.models import model_path
from tests.engine.runner import Engine, EngineSpec

MEMORY = 256 << 20
HOLDS = re.compile(r"kvpool: store ready: .*; rank (\d+) holds (.*)")


@pytest.mark.parametrize(
    ("cell", "block_size"),
    [
        (Cell("qwen3", "tp2"), 32),
        (Cell("mla", prefix_caching=False), 16),  # the only block size of vLLM's MLA on CPUs
        (Cell("gemma3", load_async=True), 32),
    ],
    ids=["gqa", "mla", "sliding"],
)
def test_predicted_bytes_are_allocated(
    cell: Cell, block_size: int, pool_root: Path, start_engine: Callable[[EngineSpec], Engine]
) -> None:
    """The memory is a whole number of blocks as predicted: were a block larger, there would be one less."""
    tp = 2 if cell.parallel == "tp2" else 1
    plan = Plan(tokens=4096, concurrency=1, tp=tp, block_size=block_size, kv_dtype="float32")
    shape = model_shape(read_model(str(model_path(cell.model))))
    kv = kv_bytes(shape, plan)
    predicted = engine_block_bytes(kv, block_size)
    blocks = MEMORY // predicted
    spec = cell_spec(cell, pool_root)
    spec.args["block_size"], spec.kv_bytes = block_size, blocks * predicted
    engine = start_engine(spec)
    assert engine.started["block_size"] == block_size
    assert engine.started["num_gpu_blocks"] == blocks
    ranks = dict(HOLDS.findall(engine.log_path.read_text(errors="replace")))
    assert sorted(ranks) == [str(rank) for rank in range(tp)]
    expected = sorted(sum(map(kv.layer, group)) * block_size for group in groups(shape))
    for held in ranks.values():
        assert sorted(int(nbytes) for nbytes in re.findall(r": (\d+) bytes a block", held)) == expected
    assert sum(expected) == kv.per_token_rank * block_size
