"""Ten thousand small requests with aborts, preemptions and failures: no table grows, nothing is left, memory stays flat."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.contract.fakestore import FakeStore
from tests.contract.fuzz import Chances, Fuzz
from tests.contract.harness import Harness
from tests.contract.spec import Spec

REQUESTS = 10_000
ROUND = 500
CHANCES = Chances(abort=0.03, preempt=0.03, evict=0.02, forget_local=0.2, get=0.02, put=0.02)
OPTIONS = {"breaker_cooldown_ms": 5, "negative_cache_ms": 200, "negative_cache_entries": 200}
SHAPES = {
    "sync": {"share": 0.4},
    "async": {"share": 0.4, "load_async": True},
    "hybrid": {"share": 0.1, "groups": (("full", 0), ("sliding", 24)), "num_blocks": 128},
    "tp2": {"share": 0.1, "tp": 2},
}
GROWTH_LIMIT = 40.0  # bytes a request: one leaked Python object would be more
WARM = 4  # rounds until caches and the allocator are full


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class LongRun:
    """One engine over many rounds; after each it is idle, and its books are compared."""

    def __init__(self, fields: dict) -> None:
        share = fields.pop("share")
        self.rounds = max(6, int(REQUESTS * share) // ROUND)
        self.engine = Harness(
            Spec(num_blocks=fields.pop("num_blocks", 64), options=OPTIONS, **fields), FakeStore(), check_store=False
        )
        self.engine.store.log = False
        self.fuzz = Fuzz(self.engine, 1, CHANCES)
        self.sizes: list[int] = []
        self.memory: list[int] = []

    def run(self) -> None:
        rules = dict(self.engine.store.rules)
        for number in range(self.rounds):
            self.engine.store.rules = dict(rules)
            self.engine.steps = 0
            self.fuzz.run((number + 1) * ROUND)
            self.fuzz.finish()
            self.engine.assert_clean()
            for name in self.engine.requests:
                self.engine.prefixes.forget(name)
            self.engine.answers.clear()
            self.engine.requests.clear()
            self.engine.external.clear()
            self.sizes.append(self.kept())
            gc.collect()
            self.memory.append(rss())
            print(number, self.sizes[-1], self.memory[-1])

    def kept(self) -> int:
        """Entries of every container that the two sides keep between requests, but for the bounded memories."""
        pool, sides = self.engine.pool, [rank.worker_side for rank in self.engine.ranks]
        return sum(containers(one) for one in (pool, pool._matcher, pool._service, pool._held, pool._pins, *sides))


BOUNDED = ("negatives", "_offers", "_watch", "stats", "_stats", "_store", "_agreement", "_manager")


def containers(owner: object) -> int:
    found = [value for name, value in vars(owner).items() if name not in BOUNDED]
    return sum(len(value) for value in found if isinstance(value, dict | list | set))


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Pytest keeps every log line of a test, which would look like a leak."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("shape", SHAPES)
def test_bc_103_a_long_run_leaves_nothing_behind(shape):
    run = LongRun(dict(SHAPES[shape]))
    try:
        run.run()
    finally:
        run.engine.close()
    assert len(set(run.sizes)) == 1, f"tables grow: {run.sizes}"
    assert len(run.engine.pool.negatives) <= OPTIONS["negative_cache_entries"]
    assert len(run.engine.pool._offers._unsaved) <= 65536
    warm = run.memory[min(WARM, len(run.memory) - 2) :]
    # A leak grows in every round; the allocator takes a piece now and then.
    growth = float(np.median(np.diff(warm))) / ROUND if len(warm) > 3 else 0.0
    assert growth < GROWTH_LIMIT, f"{growth:.1f} bytes a request: {run.memory}"


def test_control_a_table_that_grows_is_noticed():
    run = LongRun({"share": 0.0})
    finished = run.engine.pool.finished
    kept: dict[str, object] = {}
    run.engine.pool.kept_by_mistake = kept
    run.engine.pool.finished = lambda request: kept.update({request.request_id: request}) or finished(request)
    run.rounds = 2
    try:
        run.run()
    finally:
        run.engine.close()
    assert len(set(run.sizes)) == 2
