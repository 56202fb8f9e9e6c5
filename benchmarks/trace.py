"""Hit rates of the real store on public traces, against exact LRU: keys and small objects instead of a model.

The traces are `conversation_trace.jsonl` and `synthetic_trace.jsonl` of the repository kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Report
from benchmarks.settings import Settings
from kvpool.stores.base import Batch, Hit
from kvpool.stores.local import LocalStore

FIGURES = r"hit_rate_.*|trace_.*"
BLOCK, OBJECT = 512, 4096  # tokens of a trace's block; bytes that stand for it
SOURCE = "FAST25-release/traces of the public repository kvcache-ai/Mooncake"
TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
# Percent of all input tokens, by exact LRU with so many blocks, on the whole traces: computed independently of this file.
GOLDEN = {
    "conversation": {5_000: 12.1, 10_000: 21.9, 50_000: 36.3},
    "synthetic": {5_000: 29.0, 10_000: 44.3, 50_000: 65.0},
}


@dataclass(frozen=True)
class Request:
    """`blocks`: ids of its full blocks; an id stands for the whole prefix up to it."""

    tokens: int
    blocks: list[int]


def run(report: Report, settings: Settings) -> None:
    for name, file in TRACES.items():
        path = settings.traces / file if settings.traces else None
        if path is None or not path.exists():
            why = f"no {file}: give --traces DIR (or KVPOOL_TRACES) with the files of {SOURCE}"
            for capacity in GOLDEN[name]:
                report.missing(f"hit_rate_{name}_{capacity}", why)
            continue
        requests = read(path)[: 500 if settings.quick else None]
        for capacity in [5_000] if settings.quick else GOLDEN[name]:
            measured, exact = 100 * replay(requests, capacity), 100 * lru(requests, capacity)
            golden = exact if settings.quick else GOLDEN[name][capacity]
            report.add(f"hit_rate_{name}_{capacity}", measured)
            report.add(f"hit_rate_lru_{name}_{capacity}", exact)
            report.add(f"hit_rate_off_{name}_{capacity}", abs(measured - golden))


def read(path: Path) -> list[Request]:
    """Only full blocks count: the last id of a request may stand for a part of one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Request(row["input_length"], row["hash_ids"][: row["input_length"] // BLOCK]) for row in rows]


def rate(requests: Sequence[Request], hits: Sequence[int]) -> float:
    """Share of all tokens that came from the pool; the last token of a request is computed in any case."""
    saved = sum(min(blocks * BLOCK, request.tokens - 1) for request, blocks in zip(requests, hits, strict=True))
    return saved / sum(request.tokens for request in requests)


def lru(requests: Sequence[Request], capacity: int) -> float:
    """Exact LRU, one block at a time, the head of a prefix touched last."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        hits.append(next((i for i, block in enumerate(request.blocks) if block not in held), len(request.blocks)))
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return rate(requests, hits)


def replay(requests: Sequence[Request], capacity: int) -> float:
    """The same requests through a pool, as the connector uses it: look up, lease, get, put what was missing, release."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    store = LocalStore(folder, "trace", capacity * OBJECT, "remove")
    memory = np.zeros(OBJECT, dtype=np.uint8)
    store.open()
    try:
        return rate(requests, [serve(store, request, memory) for request in requests])
    finally:
        store.close()
        shutil.rmtree(folder)


def serve(store: LocalStore, request: Request, memory: np.ndarray) -> int:
    """Blocks of the prefix that were in the pool."""
    keys = [b"v1:0123456789abcdef:g0:h0-7_l0-31_c0_0:%064x" % (block * 2654435761) for block in request.blocks]
    answers = store.exists(keys)
    hits = next((i for i, answer in enumerate(answers) if not isinstance(answer, Hit)), len(keys))
    lease = store.lease(keys[:hits], 60.0)
    store.get(batch(keys[:hits], memory), 30.0)
    store.release(lease)
    results = store.put(batch(keys[hits:], memory), 30.0).results()
    if not all(result.stored for result in results):
        raise RuntimeError(f"the pool did not take a block: {next(r for r in results if not r.stored)}")
    return hits


def batch(keys: list[bytes], memory: np.ndarray) -> Batch:
    addresses = np.full((len(keys), 1), memory.ctypes.data, dtype=np.int64)
    return Batch(keys, addresses, np.array([OBJECT], dtype=np.int64))
