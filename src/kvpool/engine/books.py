"""The books of the scheduler side: what jobs have come to, in tokens, and which KV events follow from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.logger import init_logger

from kvpool.core.hits import GroupSpec
from kvpool.core.jobs import Job, JobReport, LoadJob
from kvpool.core.sources import Run, tokens_by_rank
from kvpool.engine.agreement import Space
from kvpool.engine.kv_events import KvEvents
from kvpool.engine.lookup import TIERS
from kvpool.engine.stats import PoolStats, labelled
from kvpool.engine.sweep import Look, Sweep
from kvpool.engine.threads import Ticket
from kvpool.stores.base import Store

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")


def tokens_by_tier(runs: Sequence[Run], first: int, end: int) -> dict[str, int]:
    """Tokens by tier; "none" for those that a hit covers and nobody needs (they lie before a window)."""
    counts = tokens_by_rank(runs, first, end)
    return {TIERS[rank].value if rank >= 0 else "none": tokens for rank, tokens in counts.items()}


class Books:
    """``opened`` -> ``ended`` by every rank, or ``cancelled``. An error in KV events ends these, never the engine's step."""

    def __init__(
        self,
        stats: PoolStats,
        groups: Sequence[GroupSpec],
        events: KvEvents | None,
        store: Store,
        run: Callable[[Callable[[], Look]], Ticket[Look]],
    ) -> None:
        """``events``: None where nobody has asked for KV events. ``run`` runs a task off the engine's thread."""
        self._stats = stats
        self._block_size = groups[0].block_size
        self._events = events
        self._sweep = Sweep(store, events, run) if events is not None else None
        self._loading: dict[int, Mapping[str, int]] = {}

    def opened(self, job: Job, request: Request, space: Space, sources: Mapping[str, int] | None = None) -> None:
        """``sources``: of a load, its tokens by tier."""
        if sources is not None:
            self._loading[job.job_id] = sources
        self._tell(lambda events: events.note(job, request, space))

    def ended(self, job: Job, report: JobReport, ours: bool) -> None:
        """``report`` is that of all ranks. ``ours``: the namespace is still the one in use."""
        loading = isinstance(job, LoadJob)
        if loading:
            sources = self._loading.pop(job.job_id, {})
            for tier, tokens in sources.items() if not report.failed else ():
                self._stats.add(labelled("loaded_tokens", tier=tier), tokens)
        else:
            lost = set(report.unsaved)
            blocks = sum((0, h) not in lost for part in job.parts if part.group == 0 for h in part.hashes)
            self._stats.add("saved_tokens", blocks * self._block_size)
        if ours:
            self._tell(lambda events: events.stored(job.job_id, but=report.failed if loading else report.unsaved))
            self._tell(lambda events: events.removed(report.gone))
        else:
            self._tell(lambda events: events.drop(job.job_id))

    def cancelled(self, job: Job) -> None:
        self._loading.pop(job.job_id, None)
        self._tell(lambda events: events.drop(job.job_id))

    def reset(self) -> None:
        """The engine has moved to an empty namespace."""
        self._tell(lambda events: events.forget_all())

    def cleared(self) -> None:
        """vLLM has emptied its own prefix cache, and says so to all who listen."""
        self._tell(lambda events: events.cleared())

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """KV events since the last call."""
        sweep = self._sweep
        if sweep is None:
            return []
        self._tell(lambda events: sweep.step())
        if self._events is None:
            return []
        taken, lost = self._events.take(), self._events.take_dropped()
        for event in taken:
            kind = "stored" if isinstance(event, BlockStored) else "removed"
            self._stats.add(labelled("kv_events", kind=kind), len(event.block_hashes))
        if lost:
            self._stats.add("kv_events_dropped", lost)
        return taken

    def _tell(self, call: Callable[[KvEvents], None]) -> None:
        """Events say what subscribers may believe of a pool that works without them; those of a newer vLLM may look otherwise."""
        if self._events is None:
            return
        try:
            call(self._events)
        except Exception:
            logger.exception("kvpool: there are no more KV events of the pool until this engine restarts")
            self._events = self._sweep = None

    def __len__(self) -> int:
        return len(self._loading) + (self._events.open_jobs() if self._events is not None else 0)
