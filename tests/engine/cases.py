"""The engine matrix: which modes are tested, which cannot be, and how one cell is checked.

A cell is one engine in a fresh process. Cells of one model and one way of sharding use one pool, so every cell but the first hits
what another process, in another mode, has stored.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.runner import Engine, EngineSpec, metric, tokens

MODELS = ("qwen3", "mla", "gemma3", "moe")
PARALLEL: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}
# Cached tokens may be one block short where the last block of a prompt is not whole.
SHARED, TAIL = 1280, 200


@dataclass(frozen=True)
class Cell:
    model: str
    parallel: str = "one"
    load_async: bool = False
    prefix_caching: bool = True
    eager: bool = True

    def __str__(self) -> str:
        load, caching = "async" if self.load_async else "sync", "apc" if self.prefix_caching else "noapc"
        return f"{self.model}-{self.parallel}-{load}-{caching}-{'eager' if self.eager else 'compiled'}"

    @property
    def pool(self) -> str:
        """The name of its pool."""
        return f"{self.model}-{self.parallel}"

    @property
    def impossible(self) -> str:
        """Why vLLM 0.32 on CPU cannot run this cell by itself; empty when it can."""
        if self.parallel == "pp2" and self.eager:
            return "eager pipeline parallelism fails in vLLM without a connector too"
        if self.model == "mla" and self.prefix_caching:
            return "the CPU platform switches prefix caching off for MLA"
        if self.model == "moe" and self.parallel == "dp2":
            return "vLLM's CPU communicator lacks the exchange that experts need between data-parallel ranks"
        if self.model in ("gemma3", "moe") and not self.load_async:
            return "several KV-cache groups always load asynchronously"
        return ""


def all_cells() -> list[Cell]:
    """Every combination that can run, cells of one pool next to one another."""
    flags = (False, True)
    cells = [Cell(*values) for values in itertools.product(MODELS, PARALLEL, flags, flags, flags)]
    return [cell for cell in cells if not cell.impossible]


# Every pair of values that can occur together occurs in one of these (checked by test_exactness).
CI_CELLS = [
    Cell("qwen3", "one", load_async=False, prefix_caching=True, eager=True),
    Cell("qwen3", "one", load_async=True, prefix_caching=False, eager=False),
    Cell("qwen3", "tp2", load_async=False, prefix_caching=False, eager=True),
    Cell("qwen3", "pp2", load_async=False, prefix_caching=True, eager=False),
    Cell("qwen3", "dp2", load_async=False, prefix_caching=False, eager=False),
    Cell("mla", "tp2", load_async=True, prefix_caching=False, eager=False),
    Cell("mla", "one", load_async=False, prefix_caching=False, eager=True),
    Cell("gemma3", "one", load_async=True, prefix_caching=False, eager=False),
    Cell("gemma3", "tp2", load_async=True, prefix_caching=True, eager=True),
    Cell("gemma3", "dp2", load_async=True, prefix_caching=True, eager=True),
    Cell("moe", "one", load_async=True, prefix_caching=True, eager=True),
    Cell("moe", "pp2", load_async=True, prefix_caching=False, eager=False),
]


def pool_config(root: Path, name: str, **extra: Any) -> dict[str, Any]:
    """A kv-transfer-config with a pool of its own."""
    policy = extra.pop("kv_load_failure_policy", "recompute")
    options = {
        "backend": "local",
        "local_pool_root": str(root),
        "local_pool_name": name,
        "local_dram_size": "512MB",
        "lookup_timeout_ms": 20_000,  # a busy machine is no reason for a miss
        **extra,
    }
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": options,
    }


def cell_spec(cell: Cell, root: Path, **extra: Any) -> EngineSpec:
    # Loads inside a step exist only where a failed one ends its requests: see engine/setup.py.
    extra.setdefault("kv_load_failure_policy", "recompute" if cell.load_async else "fail")
    args: dict[str, Any] = {
        **PARALLEL[cell.parallel],
        "enforce_eager": cell.eager,
        "enable_prefix_caching": cell.prefix_caching,
        "kv_transfer_config": pool_config(root, cell.pool, load_async=cell.load_async, **extra),
    }
    return EngineSpec(model=cell.model, args=args)


def check_cell(
    engine: Engine, cell: Cell, pool_is_filled: bool, tries: int = 1, spoil: AbstractContextManager[None] | None = None
) -> None:
    """Greedy outputs with hits from the pool equal those without, in the same engine, for prompts that share a prefix.

    The reference uses a cache salt of its own: its hashes are its own, so neither device nor pool has anything for it. A store
    behind other processes may time out on a busy machine: with ``tries`` the tokens must be right each time, and hits come in one.
    Within ``spoil`` the pool is corrupt: the same hits must then give other tokens.
    """
    prompts = [tokens((1, SHARED), (seed, TAIL)) for seed in (2, 3)]
    # Outputs of differing batches may differ by themselves, so like is compared with like: one request at a time.
    ask: Callable[..., Any] = lambda **more: engine.generate(prompts, max_tokens=12, concurrent=False, **more)  # noqa: E731
    salts = [uuid.uuid4().hex for _ in prompts]
    reference = engine.generate(prompts[:1], max_tokens=12, cache_salt=salts[0])
    reference += engine.generate(prompts[1:], max_tokens=12, cache_salt=salts[1])
    assert [r["num_cached_tokens"] or 0 for r in reference] == [0, 0], "a salt of its own must hit nothing"
    expected = [r["token_ids"] for r in reference]
    assert len({tuple(t) for t in expected}) == 2, "degenerate outputs prove nothing"
    if not pool_is_filled:
        first = ask()
        assert [r["token_ids"] for r in first] == expected
        engine.do("wait_idle")
        if cell.prefix_caching:
            assert engine.do("reset_prefix_cache"), "device blocks were still in use"
    for left in range(tries, 0, -1):
        hits = ask()
        assert [r["token_ids"] for r in hits] == expected
        engine.do("wait_idle")
        if left == 1 or all((r["num_cached_tokens"] or 0) >= SHARED for r in hits):
            break
        if cell.prefix_caching:
            assert engine.do("reset_prefix_cache"), "device blocks were still in use"
    assert all(r["num_cached_tokens"] >= SHARED for r in hits), f"cached: {[r['num_cached_tokens'] for r in hits]}"
    samples = engine.metrics()
    assert metric(samples, "kvpool:hit_tokens_total") >= SHARED, "the hit did not come from the pool"
    assert tries > 1 or metric(samples, "kvpool:load_failures_total") == 0
    assert tries > 1 or metric(samples, "kvpool:save_failures_total") == 0
    if spoil is not None:
        assert not cell.prefix_caching or engine.do("reset_prefix_cache"), "device blocks were still in use"
        with spoil:
            wrong = ask()
        assert all(r["num_cached_tokens"] >= SHARED for r in wrong), f"cached: {[r['num_cached_tokens'] for r in wrong]}"
        assert [r["token_ids"] for r in wrong] != expected, "a corrupt pool gives the same tokens: the check has no power"
