"""What a worker does with jobs: turns them into batches, gives them to the store and keeps the books."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.logger import init_logger

from kvpool.core.jobs import BlockName, Job, JobPart
from kvpool.core.keys import block_keys, key_prefix
from kvpool.core.layout import BlockLayout
from kvpool.core.shards import saves_block
from kvpool.engine.log_gate import LogGate
from kvpool.engine.stats import PoolStats, labelled
from kvpool.stores.base import Batch, Handle, Result, Status, Store, Tier

logger = init_logger("vllm.kvpool")

CODES_TOLD = 8
BATCH_OBJECTS = 64  # objects in one store call: bounds what one deadline covers and how long one call may take


@dataclass
class Outcome:
    """How a job ended. ``running`` are calls that were given up but still use the blocks."""

    failed: list[tuple[BlockName, int]] = field(default_factory=list)  # block name, block id
    gone: list[BlockName] = field(default_factory=list)  # of these, what the store does not have
    running: list[Handle] = field(default_factory=list)
    calls: int = 0  # of the store
    stats: PoolStats = field(default_factory=PoolStats)


@dataclass(frozen=True)
class Piece:
    """Blocks of one part that are one batch of one shard; ``rows`` index the part."""

    part: JobPart
    rows: Sequence[int]
    batch: Batch


class Transfers:
    """Loads and saves of one rank. Thread-safe: what it holds never changes."""

    def __init__(self, store: Store, layouts: Sequence[BlockLayout]) -> None:
        self._store = store
        self._layouts = layouts
        self._log = LogGate()
        self._own_tier = Tier.DRAM if store.capabilities.mapped else Tier.REMOTE  # of a store that does not tell

    def load(self, job: Job) -> Outcome:
        """Read every block of a job into its place. A block is good only if every shard of it on this rank is."""
        return self._run(job, loading=True)

    def save(self, job: Job) -> Outcome:
        """Store the blocks that are this rank's to store."""
        return self._run(job, loading=False)

    def _run(self, job: Job, loading: bool) -> Outcome:
        outcome, started = Outcome(), time.monotonic()
        bad: dict[BlockName, int] = {}
        codes: Counter[str] = Counter()
        verb = "load" if loading else "save"
        for piece in self._pieces(job, loading):
            results = self._call(piece.batch, started + job.deadline_s, loading, outcome)
            self._book(piece, results, loading, bad, codes, outcome)
        outcome.failed = list(bad.items())
        outcome.stats.add(f"{verb}s/reason={'failed' if bad else 'ok'}" if loading else "saves")
        outcome.stats.observe(f"{verb}_seconds", time.monotonic() - started)
        if bad:
            self._tell(job, "get" if loading else "put", bad, codes)
        return outcome

    def _tell(self, job: Job, name: str, bad: dict[BlockName, int], codes: Counter[str]) -> None:
        more = self._log.ask(name)
        if more is not None:
            told = sorted(codes)[:CODES_TOLD]
            logger.error(
                "Failed to %s %d keys out of %d for request %s, error_codes=%s%s",
                name, len(bad), job.num_blocks, job.request_id, told, more,
            )  # fmt: skip
        logger.debug("job %d of request %s: not %s: %s", job.job_id, job.request_id, name, [(g, h.hex()) for g, h in bad])

    def _pieces(self, job: Job, loading: bool) -> list[Piece]:
        pieces = []
        for part in job.parts:
            for layout in self._layouts:
                if layout.group != part.group:
                    continue
                prefix = key_prefix(job.namespace, layout.group, layout.shard)
                rows = [r for r, i in enumerate(part.indexes) if loading or saves_block(i, layout.replica, layout.replicas)]
                for first in range(0, len(rows), BATCH_OBJECTS):
                    chosen = rows[first : first + BATCH_OBJECTS]
                    keys = block_keys(prefix, [part.hashes[r] for r in chosen])
                    addresses = layout.addresses(np.array([part.block_ids[r] for r in chosen], dtype=np.int64))
                    pieces.append(Piece(part, chosen, Batch(keys, addresses, layout.sizes)))
        return pieces

    def _call(self, batch: Batch, end: float, loading: bool, outcome: Outcome) -> list[Result]:
        """One store call with its deadline; a passing fault of a put is tried once more."""
        results = self._once(batch, end, loading, outcome)
        again = [i for i, r in enumerate(results) if r.status is Status.TRANSIENT]
        if loading or not again or outcome.running:
            return results
        retry = Batch([batch.keys[i] for i in again], batch.addresses[again], batch.sizes)
        for i, result in zip(again, self._once(retry, end, loading, outcome), strict=True):
            results[i] = result
        return results

    def _once(self, batch: Batch, end: float, loading: bool, outcome: Outcome) -> list[Result]:
        count, left = len(batch.keys), end - time.monotonic()
        if left <= 0 or outcome.running:
            return [Result(Status.TRANSIENT, text="deadline")] * count
        outcome.calls += 1
        started = time.monotonic()
        results = self._guarded(batch, left, loading, outcome)
        self._time_call("load" if loading else "save", results, time.monotonic() - started, outcome.stats)
        return results

    def _time_call(self, op: str, results: Sequence[Result], seconds: float, stats: PoolStats) -> None:
        """Its bytes and seconds count for one tier, so that their quotient is that tier's speed."""
        tiers = {self._tier(result) for result in results if result.nbytes and result.status is Status.OK}
        tier = ("mixed" if len(tiers) > 1 else tiers.pop()) if tiers else "none"
        stats.observe(labelled("call_seconds", op=op, tier=tier), seconds)
        stats.add(labelled("call_bytes", op=op, tier=tier), sum(r.nbytes for r in results if r.status is Status.OK))

    def _tier(self, result: Result) -> str:
        return (result.tier or self._own_tier).value

    def _guarded(self, batch: Batch, left: float, loading: bool, outcome: Outcome) -> list[Result]:
        """The call itself: whatever the store does, an answer for every key."""
        count = len(batch.keys)
        try:
            handle = self._store.get(batch, left) if loading else self._store.put(batch, left)
            if not handle.wait(left) and not handle.abandon():
                outcome.running.append(handle)
                return [Result(Status.TRANSIENT, text="deadline")] * count
            results = handle.results() if handle.done() else []
        except Exception as error:  # noqa: BLE001 - any fault of a store is a failed call, never a dead thread
            return [Result(Status.FATAL, text=f"{type(error).__name__}: {error}")] * count
        if results is None or len(results) != count:
            return [Result(Status.TRANSIENT, text="deadline or no answer")] * count
        return list(results)

    def _book(
        self,
        piece: Piece,
        results: Sequence[Result],
        loading: bool,
        bad: dict[BlockName, int],
        codes: Counter[str],
        outcome: Outcome,
    ) -> None:
        stats, nbytes = outcome.stats, piece.batch.object_nbytes
        verb, done = ("load", "loaded") if loading else ("save", "saved")
        moved = Counter(self._tier(r) for r in results if r.status is Status.OK and (r.nbytes == nbytes or not loading))
        for tier, count in moved.items():
            stats.add(labelled(f"{done}_blocks", tier=tier), count)
            stats.add(labelled(f"{done}_bytes", tier=tier), count * nbytes)
        for row, result in zip(piece.rows, results, strict=True):
            good = (result.status is Status.OK and result.nbytes == nbytes) if loading else result.stored
            if good:
                if result.status is Status.EXISTS:
                    stats.add("known_blocks")
                continue
            name = (piece.part.group, piece.part.hashes[row])
            bad[name] = piece.part.block_ids[row]
            if loading and result.status is Status.MISSING:
                outcome.gone.append(name)
            codes[str(result.code if result.code is not None else result.status.value)] += 1
            stats.add(labelled(f"{verb}_failures", reason=result.status.value))
