"""The connector in the scheduler: matches requests, plans jobs, keeps blocks pinned until every rank has reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.core.breaker import Breaker, BreakerState
from kvpool.core.hits import needed_blocks
from kvpool.core.jobs import BlockName, Job, JobPart, JobReport, LoadJob, SaveJob, block_names
from kvpool.core.recent import RecentSet
from kvpool.engine.adapters import AdapterDigests
from kvpool.engine.agreement import Agreement, Space
from kvpool.engine.alarm import ZeroHitAlarm
from kvpool.engine.books import Books, tokens_by_tier
from kvpool.engine.exposed import ExposedTables
from kvpool.engine.held import HeldSaves
from kvpool.engine.job_table import JobTable
from kvpool.engine.kv_events import KvEvents
from kvpool.engine.lookup import LookupService
from kvpool.engine.matching import Matcher, MatchLimits
from kvpool.engine.messages import PoolMetadata, RankInfo, WorkerReport
from kvpool.engine.opening import announce
from kvpool.engine.pins import BlockPins
from kvpool.engine.requests import RequestState
from kvpool.engine.saving import SaveOffers
from kvpool.engine.setup import EngineSetup
from kvpool.engine.stats import PoolStats, labelled, pool_stats
from kvpool.engine.store_gauges import StoreGauges
from kvpool.engine.watch import Watch
from kvpool.stores.base import Store

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")


LOAD_PATIENCE_S = 0.005  # a request that comes meanwhile waits no longer than this; on few CPUs, spinning slows the load down


class SchedulerSide:
    """Runs in one thread, the engine's. ``store`` is used for lookups, leases and ``reset_cache`` only."""

    def __init__(self, setup: EngineSetup, store: Store, agreement: Agreement, events: KvEvents | None = None) -> None:
        options = setup.options
        self._setup = setup
        self._store = store
        self._agreement = agreement
        self.stats = PoolStats()
        self.breaker = Breaker(options.breaker_failures, options.breaker_cooldown_ms / 1000)
        self.negatives = RecentSet(options.negative_cache_entries, options.negative_cache_ms / 1000)
        self._service = LookupService(store, setup.groups, options.lease_ms / 1000, self.negatives, setup.give_back)
        waits = (options.lookup_wait_ms / 1000, options.lookup_timeout_ms / 1000)
        limits = MatchLimits(*waits, options.min_hit_tokens)
        self._matcher = Matcher(self._service, setup.groups, limits, self.breaker, self.stats)
        self._offers = SaveOffers(setup.groups, setup.save_decode)
        self._adapters = AdapterDigests()
        self._requests: dict[str, RequestState] = {}
        self._new_loads: list[LoadJob] = []
        self._held = HeldSaves(setup.world_size)
        self._exposed = ExposedTables()
        self._workers_down = False  # for loads
        self._saves_down = False
        self._books = Books(self.stats, setup.groups, events, store, self._service.run)
        self._gauges = StoreGauges(store)
        self._told_gauges: dict[str, float] = {}
        # After a reset that could not drop the engine's own cache: a request that hits there has KV of before the reset.
        self._local_stale = False
        self._alarm = ZeroHitAlarm(setup, store, agreement)
        self._watch = Watch(options.zero_hit_alarm_lookups, self._alarm.explain, self._service.run)

    # ---- set-up -------------------------------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        limit = max(1, self._setup.num_blocks * self._setup.options.max_pinned_save_percent // 100)
        self._pins = BlockPins(manager.block_pool, limit)
        self._jobs = JobTable(self._service, self._pins, self._setup.world_size)
        # vLLM refuses to reset its prefix cache while any block is in use; our pins only keep blocks from being handed out.
        reset = manager.reset_prefix_cache

        def reset_unpinned() -> bool:
            # With a job past its deadline it refuses as ever: a call may still be at memory that vLLM would give away.
            done = reset() if self._jobs.overdue() else self._pins.lifted(reset)
            if done:
                self._books.cleared()
            return done

        manager.reset_prefix_cache = reset_unpinned  # type: ignore[method-assign]

    def meet(self, rank: RankInfo) -> None:
        """A worker's handshake. RuntimeError naming the field where ranks disagree."""
        if self._agreement.add(rank):
            loads = "asynchronous" if self._load_async else "synchronous"
            self._service.run(lambda: announce(self._store, self._setup, loads))

    def greet(self, request: Request) -> None:
        """A request has come: by now all ranks have met and vLLM knows its hash seed, so the namespace can be made."""
        if self._agreement.settle():
            self._service.run(lambda: self._agreement.introduce(self._store))
        self._state(request)

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            state = self._requests[request.request_id] = RequestState(request)
            if request.lora_request is not None:
                path = request.lora_request.lora_path
                state.adapter = self._service.run(lambda: self._adapters.digest(path))
        return state

    def _space(self, state: RequestState) -> Space | None:
        """Where the request's KV lives; None when it is not pooled (or not yet known to be)."""
        if not self._agreement.ready:
            return None
        if state.adapter is None:
            return self._agreement.space()
        digest = state.adapter.value if state.adapter.done() else None
        return self._agreement.space(digest) if digest and digest not in self._adapters.retired else None

    # ---- loads --------------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        state = self._state(request)
        state.computed = computed
        if state.adapter is not None and not state.adapter.wait(0) and self._matcher.may_wait(state):
            return None, False
        space = self._space(state)
        if not self._setup.loads:
            return 0, False
        if self._workers_down or space is None:
            not_now = "not_pooled" if self._agreement.ready else "not_ready"
            self._matcher.refuse(state, computed, "breaker_open" if self._workers_down else not_now)
            return 0, False
        tokens = self._matcher.match(state, computed, space)
        return tokens, bool(tokens) and self._load_async

    @property
    def _load_async(self) -> bool:
        # A call that cannot be abandoned must not hold up a step.
        return self._setup.load_async or not self._store.capabilities.abandonable

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        state = self._state(request)
        if self._local_stale and state.computed > 0:
            state.stale = True
        self._matcher.count(state, loading=tokens > 0)
        space = self._space(state)
        if tokens <= 0 or space is None:
            # It computes now: whatever went wrong before is behind it.
            state.loads_failed, state.gave_up = 0, False
            if state.load_job is None:
                self._matcher.forget(state)
            return
        parts = self._load_parts(state, blocks.get_block_ids(), state.computed, state.computed + tokens)
        timeout = self._setup.options.load_timeout_ms / 1000
        job = LoadJob(self._jobs.next_id(), request.request_id, parts, timeout, space.namespace, self._load_async)
        found = state.found
        state.sources = tokens_by_tier(found.runs, state.computed, state.computed + tokens) if found is not None else {}
        state.lookup, state.found, state.load_job = None, None, job.job_id
        self._jobs.open(job, found.lease if found is not None else None)
        self._books.opened(job, request, space, state.sources)
        self._new_loads.append(job)

    def hit_sources(self, request: Request) -> dict[str, int]:
        """The tokens of the hit that was just allocated, by tier."""
        state = self._requests.get(request.request_id)
        return state.sources if state is not None else {}

    def _load_parts(self, state: RequestState, tables: Sequence[Sequence[int]], computed: int, end: int) -> list[JobPart]:
        parts = []
        for index, group in enumerate(self._setup.groups):
            hashes, table = state.request.block_hashes, tables[index]
            # Every block that vLLM gave a place is loaded: one left out would be cached by vLLM with whatever it holds.
            blocks = [i for i in range(computed // group.block_size, end // group.block_size) if table[i] != 0]
            assert set(needed_blocks(group, computed, end)) <= set(blocks), "vLLM gave no place to a block that the hit needs"
            names: list[bytes] = [hashes[i * group.units + group.units - 1] for i in blocks]
            parts.append(JobPart(index, blocks, names, [table[i] for i in blocks]))
        return parts

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> PoolMetadata:
        idle = not output.total_num_scheduled_tokens
        patience = LOAD_PATIENCE_S if idle and not self._matcher.waiting and not self._setup.pipelined else 0.0
        self._matcher.new_step(idle)
        self._jobs.renew_leases()
        meta = PoolMetadata(
            self._agreement.namespace, loads=self._new_loads, notes=self._agreement.take_notes(), patience_s=patience
        )
        self._new_loads = []
        if output.has_sync_kv_loads:
            meta.echo = self._held.open_step()
            self._note_exposed(output, [job.job_id for job in meta.loads if not job.is_async])
        if self._setup.saves and self._agreement.ready:
            computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, scheduled in output.num_scheduled_tokens.items():
                job = self._save_job(output, request_id, computed[request_id], scheduled)
                if job is not None:
                    self._held.hold(job)
        meta.saves = self._held.take_ready()
        return meta

    def _note_exposed(self, output: SchedulerOutput, loads: list[int]) -> None:
        blocks = output.kv_connector_block_state
        if loads and blocks is not None:
            tables = [blocks.get_block_ids(request_id) or () for request_id in output.num_scheduled_tokens]
            self._exposed.note(loads, [table for groups in tables for table in groups])

    def _save_job(self, output: SchedulerOutput, request_id: str, start: int, scheduled: int) -> SaveJob | None:
        state, blocks = self._requests.get(request_id), output.kv_connector_block_state
        room = 0 if self._saves_down else self._pins.room()
        if state is None or state.stale or blocks is None or not self._offers.due(state, start, start + scheduled, room):
            return None
        space, tables = self._space(state), blocks.get_block_ids(request_id)
        if space is None or tables is None:
            return None
        parts, dropped = self._offers.offer(state, start, start + scheduled, tables, room)
        if dropped:
            self.stats.add(labelled("dropped_blocks", reason="breaker_open" if self._saves_down else "pinned"), dropped)
        if not parts:
            return None
        timeout = self._setup.options.save_timeout_ms / 1000
        job = SaveJob(self._jobs.next_id(), request_id, parts, timeout, space.namespace)
        self._alarm.offered(sum(len(part) * len(space.shards[part.group]) for part in parts))
        self._jobs.open(job, None)
        self._books.opened(job, state.request, space)
        return job

    # ---- reports ------------------------------------------------------------------------------------------------------------

    def update(self, output: KVConnectorOutput) -> None:
        counted = pool_stats(output.kv_connector_stats)
        if counted is not None:
            self._watch.add(counted.data)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._workers_down, self._saves_down = report.store_down, report.saves_down
            for rank in report.handshakes:
                self.meet(rank)
            self._cancel(self._held.step_ended(report.echoes, bad=bool(output.invalid_block_ids)))
            for job_id, ended in sorted(report.jobs.items()):  # as they were opened: a block is told before those behind it
                self._merge(job_id, ended)
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is not None and state.load_job is not None:
                state.load_job = None
                state.loads_failed += request_id in (output.failed_recving or ())

    def _merge(self, job_id: int, ended: JobReport) -> None:
        merged = self._jobs.merge(job_id, ended)
        if merged is None:
            return
        job, whole = merged
        state = self._requests.get(job.request_id)
        if ended.failed and isinstance(job, LoadJob):
            self.negatives.add(ended.failed)
            # The pool lacks these blocks: store them again once they have been computed.
            self._offers.note_unsaved(ended.failed)
            self._withdraw(job)
            if not job.is_async:
                self._drop_spoiled(job, set(ended.failed))
            if state is not None and state.load_job == job_id:
                state.loads_failed += 1
        if whole is None:
            return
        self._books.ended(job, whole, ours=self._agreement.owns(job.namespace))
        if isinstance(job, LoadJob):
            self._exposed.forget(job_id)
            if state is not None and state.load_job == job_id and not job.is_async:
                state.load_job = None
            if not whole.failed:
                self.negatives.discard(block_names(job.parts))
        elif self._agreement.owns(job.namespace):
            self._offers.note_unsaved(whole.unsaved)

    def _cancel(self, saves: list[SaveJob]) -> None:
        """These blocks were computed on top of KV that has turned out bad, on whichever rank."""
        for job in saves:
            self._jobs.cancel(job.job_id)
            self._books.cancelled(job)
            self._withdraw(job)
            self._offers.note_unsaved(block_names(job.parts))

    def _drop_spoiled(self, job: LoadJob, failed: set[BlockName]) -> None:
        """Blocks that a synchronous load has left wrong leave vLLM's prefix cache, with all that was computed on top of them."""
        bad = {b for part in job.parts for h, b in zip(part.hashes, part.block_ids, strict=True) if (part.group, h) in failed}
        self._manager.evict_blocks(self._exposed.spoiled(job.job_id, bad))

    def _withdraw(self, job: Job) -> None:
        """The request will compute these blocks (again): they count as not offered yet."""
        state = self._requests.get(job.request_id)
        if state is not None and state.offered:
            for part in job.parts:
                if part.indexes:
                    state.offered[part.group] = min(state.offered[part.group], *part.indexes)

    # ---- the end of requests and of the cache --------------------------------------------------------------------------------

    def finished(self, request: Request) -> None:
        """Idempotent; open jobs go on, their blocks stay pinned."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._matcher.forget(state)

    def reset(self) -> bool:
        """Start an empty namespace of our own; nothing of before can be read any more when this returns.

        Requests that live now keep their KV and never store it. Where vLLM could not drop its own cache (requests were running),
        what builds on that cache is not stored either, until a reset that could.
        """
        old = self._agreement.raise_epoch()
        for state in self._requests.values():
            self._matcher.forget(state)
            # One that holds no tokens starts from nothing: waiting, or preempted, with no load under way.
            state.stale = state.request.num_computed_tokens > 0 or state.load_job is not None
            state.offered = []
        self.negatives.clear()
        self._books.reset()
        self._offers.forget_unsaved()
        cached = len(self._manager.block_pool.cached_block_hash_to_block)
        self._local_stale = cached > 0 or any(state.stale for state in self._requests.values())
        if self._local_stale:
            logger.warning(
                "kvpool: reset while requests were running or %d blocks stayed in vLLM's own cache: KV that builds on these is not "
                "stored until a reset when the engine is idle",
                cached,
            )
        self._service.run(lambda: self._agreement.clear(self._store, old))
        return True

    def busy(self) -> bool:
        """Whether the engine should keep stepping to hear of open jobs."""
        return self._jobs.busy()

    def will_free_blocks(self) -> bool:
        """Whether waiting frees blocks soon, so that vLLM need not preempt."""
        healthy = not (self._workers_down or self._saves_down) and self.breaker.state is BreakerState.CLOSED
        return healthy and self._jobs.free_blocks_soon()

    def take_stats(self) -> PoolStats | None:
        """What has been counted since the last call; gauges too, once they have changed."""
        gauges: dict[str, float] = {
            "pinned_blocks": self._pins.total,
            labelled("breaker_state", kind="lookup"): int(self.breaker.state),
            labelled("queued_jobs", kind="lookup"): self._service.backlog(),
            labelled("oldest_job_seconds", kind="lookup"): round(self._service.oldest(), 3),
        }
        self._gauges.tell(self.stats)
        if self.stats.is_empty() and gauges == self._told_gauges:
            return None
        taken = PoolStats(data=self.stats.data)
        self.stats.reset()
        self._watch.add(taken.data)
        self._told_gauges = gauges
        for name, value in gauges.items():
            taken.gauge(name, value)
        return taken

    def take_events(self) -> Sequence[KVCacheEvent]:
        return self._books.take_events()

    def open_counts(self) -> dict[str, int]:
        """Sizes of all tables: every one is 0 when the engine is idle, but for the bounded memories."""
        return {
            "requests": len(self._requests),
            "jobs": len(self._jobs),
            "held": len(self._held),
            "pinned": self._pins.total,
            "new_loads": len(self._new_loads),
            "books": len(self._books),
        }

    def shutdown(self) -> None:
        self._jobs.release_leases()
        for state in self._requests.values():
            self._matcher.forget(state)
        self._gauges.close()
        self._service.close(2.0)
        self._store.close()
