"""Engines under measurement: the test runner's, with what all benchmarks share."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.runner import Engine, EngineSpec

from benchmarks.models import BLOCK, TAIL, Model
from kvpool.stores import make_local_store

START_S, STEP_S, RESET_S = 240.0, 300.0, 10.0


@dataclass(frozen=True)
class Setup:
    """How an engine is told to use a store: `connector` is a kv_transfer_config, `env` and `overlay` (a folder of packages) its
    surroundings."""

    name: str
    connector: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    overlay: Path | None = None


def prompt(model: Model, tokens: int, seed: int) -> list[int]:
    """`tokens` tokens that caches can hold, and a tail that is computed in any case."""
    ids: list[int] = np.random.default_rng((seed, tokens)).integers(3, model.vocab, tokens + TAIL).tolist()
    return ids


@contextmanager
def engine(model: Model, setup: Setup, longest: int, kv_tokens: int, seqs: int = 8) -> Iterator[Engine]:
    """A started engine; each prompt is prefilled in one step. Its log is kept only when it fails."""
    room = longest + TAIL + BLOCK
    args = {
        "block_size": BLOCK,
        "max_model_len": room,
        "max_num_batched_tokens": max(room, 2048),
        "max_num_seqs": seqs,
        "enable_prefix_caching": True,
        "kv_transfer_config": setup.connector,
        **model.args,
    }
    paths = [str(setup.overlay)] if setup.overlay else []
    env = {**setup.env, "PYTHONPATH": os.pathsep.join([*paths, *source_path()])}
    spec = EngineSpec(str(model.folder), args, env, kv_bytes=(kv_tokens + 4 * BLOCK) * model.token_bytes)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as logs, Engine(spec, Path(logs), START_S) as started:
        yield started


def source_path() -> list[str]:
    """The repository and its sources, before whatever PYTHONPATH there is."""
    root = Path(__file__).resolve().parents[1]
    return [str(root), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]


@contextmanager
def local_pool(name: str, dram_bytes: int) -> Iterator[Setup]:
    """A pool for one benchmark, gone afterwards; the connector is configured as README does it.

    The device caches here are hardly larger than a prompt, which fills them in one step. At the default of 10 % only its first
    blocks would be stored; in a real engine a step is a small part of the cache.
    """
    remove_pool(name)
    size = f"{max(1, dram_bytes >> 20)}MB"
    extra = {"backend": "local", "local_pool_name": name, "local_dram_size": size, "max_pinned_save_percent": 90}
    connector = {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    try:
        yield Setup("kvpool", connector)
    finally:
        remove_pool(name)


def remove_pool(name: str) -> None:
    pool = make_local_store(name=name, on_last_close="remove")
    with suppress(FileNotFoundError):
        pool.open()
        pool.close()


def first_token(running: Engine, tokens: Sequence[int]) -> tuple[float, int, list[int]]:
    """Ask one question: seconds to the first token, tokens that came from a cache, the answer. RuntimeError if it failed."""
    (result,) = running.generate([list(tokens)], STEP_S, max_tokens=4)
    if result["error"] or result["ttft_s"] is None:
        raise RuntimeError(f"the request failed: {result['error']}")
    running.do("wait_idle")
    return result["ttft_s"], result["num_cached_tokens"] or 0, result["token_ids"]


def forget_device(running: Engine) -> None:
    """Empty the engine's own prefix cache, not the pool. vLLM refuses while a block is in use, by a save for instance."""
    end = time.monotonic() + RESET_S
    while not running.do("reset_prefix_cache"):
        if time.monotonic() > end:
            raise RuntimeError("the engine would not reset its prefix cache")
        time.sleep(0.1)


def warm_up(running: Engine, model: Model, seed: int = 999) -> None:
    """The first requests of an engine compile kernels: let them be others than those that are measured."""
    for tokens in (BLOCK * 2, BLOCK * 2, BLOCK * 4):
        first_token(running, prompt(model, tokens, seed))
