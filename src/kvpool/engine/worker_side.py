"""The connector in a worker: runs load and save jobs on its own threads and reports each exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.core.breaker import Breaker, BreakerState
from kvpool.core.jobs import Job, JobReport, LoadJob, SaveJob, block_names
from kvpool.devices import Device, Event
from kvpool.engine.cache_layout import WorkerLayout, describe_caches, global_rank, local_rank, rank_name
from kvpool.engine.log_gate import LogGate
from kvpool.engine.messages import PoolMetadata, RankInfo, WorkerReport
from kvpool.engine.opening import open_store, pool_address
from kvpool.engine.runs import GRACE_S, JobRun
from kvpool.engine.setup import EngineSetup, host_identity
from kvpool.engine.stats import PoolStats, labelled
from kvpool.engine.threads import Ticket, WorkerThreads
from kvpool.engine.transfers import Outcome, Transfers
from kvpool.stores.base import Handle, Health, Store

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

LOAD_THREADS = 2
SLEEP_POLL_S = 0.001
CLOSE_SECONDS = 3.0  # vLLM kills a process five seconds after it has asked it to end


class WorkerSide:
    """``begin_step`` -> ``load`` -> forward -> ``start_saves`` -> ``take_*``, in the engine's thread; jobs run in others."""

    def __init__(self, setup: EngineSetup, device: Device) -> None:
        options = setup.options
        self._setup = setup
        self._device = device
        self._store: Store | None = None
        self._transfers: Transfers | None = None
        self._info: RankInfo | None = None
        # One each, so that saves that go well do not hide loads that hang.
        self._load_breaker, self._save_breaker = (
            Breaker(options.breaker_failures, options.breaker_cooldown_ms / 1000) for _ in range(2)
        )
        self._loaders = WorkerThreads("load", LOAD_THREADS, device.bind_thread)
        self._savers = WorkerThreads("save", 1, device.bind_thread)
        self._lock = threading.Lock()
        self._runs: dict[int, JobRun] = {}
        self._stats = PoolStats()
        self._reports: dict[int, JobReport] = {}
        self._finished_loads: set[str] = set()
        self._load_ended = threading.Event()  # and is still to be taken
        self._failed_loads: set[str] = set()
        self._bad_blocks: set[int] = set()
        # Calls that were given up but still use the blocks of a job that has been concluded.
        self._lingering: list[tuple[Job, list[Handle]]] = []
        self._echoes: dict[int, int] = {}
        self._met = False
        self._told_down = (False, False)  # loads, saves
        self._told_gauges: dict[str, float] = {}
        self._log = LogGate()
        self._asleep = False

    # ---- set-up -------------------------------------------------------------------------------------------------------------

    def register(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> None:
        layout = describe_caches(vllm_config, kv_config, caches, self._setup.options.cache_namespace, self._setup.split)
        rank = global_rank(vllm_config)
        self._store = self._store or open_store(self._setup, "worker", layout.device, local_rank(), rank)
        self._store.register(layout.regions)
        self._transfers = Transfers(self._store, layout.layouts)
        shards = tuple((one.group, str(one.shard), one.object_nbytes) for one in layout.layouts)
        self._info = RankInfo(rank_name(), layout.inputs, shards, host_identity(), layout.sharing, self._setup.record)
        self._log_ready(layout, self._store)

    def _log_ready(self, layout: WorkerLayout, store: Store) -> None:
        options = self._setup.options
        logger.info(
            "kvpool: store ready: backend=%s (%s), address=%s, tenant=%s, qos=%s, capacity=%d bytes; rank %d holds %s",
            options.backend,
            options.backend_reason,
            pool_address(self._setup),
            self._setup.record.tenant or "default",
            options.qos_priority,
            store.stats().capacity_bytes,
            rank_name(),
            ", ".join(f"group {one.group} {one.shard}: {one.object_nbytes} bytes a block" for one in layout.layouts),
        )

    @property
    def info(self) -> RankInfo | None:
        return self._info

    # ---- a step -------------------------------------------------------------------------------------------------------------

    def begin_step(self, meta: PoolMetadata) -> None:
        self._met = self._met or bool(meta.namespace)
        if meta.echo:
            self._echoes[meta.echo] = 1
        store = self._store
        if meta.notes and store is not None and self._info is not None and self._info.rank == 0:
            self._savers.submit(lambda: _leave_notes(store, meta.notes))

    def load(self, meta: PoolMetadata) -> None:
        """Run the step's synchronous loads, all within one deadline, and start the others."""
        waiting = []
        for job in meta.loads:
            if self._load_breaker.state is BreakerState.OPEN:
                self._conclude(job, _all_failed(job, "breaker_open"), free=True)
                continue
            ticket = self._submit(self._loaders, job, None)
            if not job.is_async:
                waiting.append((job, ticket))
        end = time.monotonic() + max((job.deadline_s for job, _ in waiting), default=0.0) + GRACE_S
        for job, ticket in waiting:
            if not ticket.wait(end - time.monotonic()):
                self._give_up(self._runs.get(job.job_id))
                ticket.wait(GRACE_S)  # where the thread was quicker: until it has told how the job ended

    def start_saves(self, meta: PoolMetadata) -> None:
        """After the forward: the blocks that this step filled are whole once its event has passed (one event a step)."""
        if not meta.saves:
            return
        written = self._device.record()
        for job in meta.saves:
            if self._asleep or not self._save_breaker.allow():
                self._report(job, JobReport(1, unsaved=block_names(job.parts)))
                self._count(labelled("dropped_blocks", reason="asleep" if self._asleep else "breaker_open"), job.num_blocks)
            else:
                self._submit(self._savers, job, written)

    def _submit(self, threads: WorkerThreads, job: LoadJob | SaveJob, written: Event | None) -> Ticket[Outcome | None]:
        run = JobRun(job)
        with self._lock:
            self._runs[job.job_id] = run
        ticket = threads.submit(lambda: self._attempt(job, written) if run.begin() else None)
        ticket.then(lambda ended: self._ended(run, ended.value))
        return ticket

    def _attempt(self, job: LoadJob | SaveJob, written: Event | None) -> Outcome:
        """Never raises: whatever goes wrong is a job whose every block has failed."""
        try:
            if self._asleep or self._transfers is None:
                raise RuntimeError("the KV caches are not registered")
            if written is not None:
                written.wait()
            return self._transfers.load(job) if isinstance(job, LoadJob) else self._transfers.save(job)
        except Exception:
            more = self._log.ask("failed")
            if more is not None:
                logger.exception("kvpool: job %d of request %s failed%s", job.job_id, job.request_id, more)
            return _all_failed(job, "error")

    # ---- how jobs end -------------------------------------------------------------------------------------------------------

    def _ended(self, run: JobRun, outcome: Outcome | None) -> None:
        """The thread is done with the job, in time or long after it was given up."""
        try:
            if run.conclude():
                self._conclude(run.job, outcome or _all_failed(run.job, "error"), free=True)
            elif run.begun:
                self._release(run.job, outcome.running if outcome is not None else [])
        finally:
            with self._lock:
                self._runs.pop(run.job.job_id, None)

    def _give_up(self, run: JobRun | None) -> None:
        """The job is overdue: it has failed. Its blocks stay pinned if a thread is still at it."""
        if run is not None and run.conclude():
            more = self._log.ask("overdue")
            if more is not None:
                logger.error("kvpool: job %d of request %s is overdue and given up%s", run.job.job_id, run.job.request_id, more)
            self._feed(self._breaker_of(run.job), failed=True)  # also for one that never began: the store keeps all threads
            self._conclude(run.job, _all_failed(run.job, "overdue"), free=not run.begun)

    def _conclude(self, job: LoadJob | SaveJob, outcome: Outcome, free: bool) -> None:
        """Tell how a job ended, once; ``free``: no thread is at it any more."""
        trouble = _store_trouble(outcome)
        if trouble is not None:
            self._feed(self._breaker_of(job), trouble)
        names = [name for name, _ in outcome.failed]
        # The report comes first: the scheduler must know the failed blocks before the request asks again.
        loading = isinstance(job, LoadJob)
        self._report(job, JobReport(failed=names, gone=outcome.gone) if loading else JobReport(unsaved=names))
        if free:
            self._release(job, outcome.running)
        with self._lock:
            self._stats.aggregate(outcome.stats)
            if not isinstance(job, LoadJob):
                return
            if job.is_async:
                self._finished_loads.add(job.request_id)
                self._load_ended.set()
                # Whole blocks before the first bad one are good, but only a model of one group can say which.
                if outcome.failed and (len(self._setup.groups) > 1 or outcome.running or not free):
                    self._failed_loads.add(job.request_id)
                    return
            self._bad_blocks.update(i for _, i in outcome.failed)

    def _release(self, job: Job, running: list[Handle]) -> None:
        """This rank is done with the blocks, once the calls that were given up have returned."""
        if running:
            with self._lock:
                self._lingering.append((job, running))
        else:
            self._report(job, JobReport(1))

    def _report(self, job: Job, report: JobReport) -> None:
        with self._lock:
            self._reports.setdefault(job.job_id, JobReport()).merge(report)

    def _breaker_of(self, job: Job) -> Breaker:
        return self._load_breaker if isinstance(job, LoadJob) else self._save_breaker

    def _feed(self, breaker: Breaker, failed: bool) -> None:
        breaker.failure() if failed else breaker.success()

    def _count(self, name: str, amount: float) -> None:
        with self._lock:
            self._stats.add(name, amount)

    # ---- what the engine takes away -----------------------------------------------------------------------------------------

    def take_finished_loads(self, patience_s: float = 0.0) -> tuple[set[str], set[str]]:
        """Request ids whose asynchronous load has ended, and those of them that failed whole. While loads run and none has ended,
        waits up to ``patience_s`` for one."""
        if patience_s and any(isinstance(run.job, LoadJob) for run in list(self._runs.values())):
            self._load_ended.wait(patience_s)
        for run in list(self._runs.values()):
            threads = self._loaders if isinstance(run.job, LoadJob) else self._savers
            if run.overdue(threads.stuck_for()):
                self._give_up(run)
        with self._lock:
            self._load_ended.clear()
            done, self._finished_loads = self._finished_loads, set()
            failed, self._failed_loads = self._failed_loads, set()
        return done, failed

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        self._reap()
        with self._lock:
            jobs, self._reports = self._reports, {}
        sick = [b for b in (self._load_breaker, self._save_breaker) if b.state is not BreakerState.CLOSED]
        down = (self._load_breaker in sick, self._save_breaker in sick)
        for breaker in sick:
            if not self._loaders.backlog() and breaker.allow():
                self._loaders.submit(lambda breaker=breaker: self._probe(breaker))  # type: ignore[misc]
        greeting = [self._info] if self._info is not None and not self._met else []
        changed, self._told_down = down != self._told_down, down
        echoes, self._echoes = self._echoes, {}
        if not (jobs or greeting or sick or changed or echoes):
            return None
        return WorkerReport(jobs, greeting, down[0], echoes, saves_down=down[1])

    def _probe(self, breaker: Breaker) -> None:
        """While the store is bypassed: see whether it is well again."""
        try:
            health = self._store.health() if self._store is not None else Health(False)
            well = health.ok or (health.readable and breaker is self._load_breaker)
        except Exception:  # noqa: BLE001 - a store that raises here is not well
            well = False
        self._feed(breaker, not well)

    def take_stats(self) -> PoolStats | None:
        """What has been counted since the last call; gauges that are not 0, or have just become so.

        Over ranks the largest value of a gauge counts, so a 0 that was told before need not be told again.
        """
        gauges = self._gauges()
        told, self._told_gauges = self._told_gauges, gauges
        with self._lock:
            taken, self._stats = self._stats, PoolStats()
        for name, value in gauges.items():
            if value or told.get(name) != value or not taken.is_empty():
                taken.gauge(name, value)
        return None if taken.is_empty() else taken

    def _gauges(self) -> dict[str, float]:
        kinds = (("load", self._loaders, self._load_breaker), ("save", self._savers, self._save_breaker))
        found: dict[str, float] = {}
        for kind, threads, breaker in kinds:
            found[labelled("queued_jobs", kind=kind)] = threads.backlog()
            found[labelled("oldest_job_seconds", kind=kind)] = round(threads.oldest(), 3)
            found[labelled("breaker_state", kind=kind)] = int(breaker.state)
        return found

    def _reap(self) -> None:
        """Report the jobs whose lingering calls have returned at last."""
        with self._lock:
            lingering, self._lingering = self._lingering, []
        for job, handles in lingering:
            self._release(job, [handle for handle in handles if not handle.done()])

    # ---- sleep and shutdown -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """No transfer touches KV memory after this returns. Idempotent. TimeoutError when one cannot be ended."""
        self._asleep = True
        end = time.monotonic() + self._setup.options.load_timeout_ms / 1000
        while self._runs:
            if time.monotonic() > end:
                raise TimeoutError("kvpool: a transfer is still running; the engine cannot sleep now")
            time.sleep(SLEEP_POLL_S)
        with self._lock:
            handles = [h for _, many in self._lingering for h in many]
        if not all(handle.wait(end - time.monotonic()) for handle in handles):
            raise TimeoutError("kvpool: a store call is still using KV memory; the engine cannot sleep now")

    def wake(self) -> None:
        self._asleep = False

    def shutdown(self) -> None:
        """Finish what is queued, within a few seconds, then close the store. Idempotent."""
        end = time.monotonic() + CLOSE_SECONDS
        self._savers.close(CLOSE_SECONDS)
        self._loaders.close(end - time.monotonic())
        if self._store is not None:
            self._store.close()
            self._store = None


def _store_trouble(outcome: Outcome) -> bool | None:
    """Whether the store itself failed, unlike an object that is gone or a pool that is full; None when it was not asked."""
    if not outcome.calls:
        return None
    return bool(outcome.running) or any(name.endswith(("=fatal", "=transient")) for name in outcome.stats.data)


def _leave_notes(store: Store, notes: Mapping[bytes, str]) -> None:
    for name, text in notes.items():
        store.write_note(name, text)


def _all_failed(job: Job, reason: str) -> Outcome:
    """No store call has told how the job ended."""
    loading, stats = isinstance(job, LoadJob), PoolStats()
    stats.add(labelled("loads", reason="failed") if loading else "saves")
    stats.add(labelled("load_failures" if loading else "save_failures", reason=reason), job.num_blocks)
    return Outcome(failed=list(zip(block_names(job.parts), job.block_ids, strict=True)), stats=stats)
