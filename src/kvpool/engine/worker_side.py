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
from kvpool.engine.cache_layout import WorkerLayout, describe_caches, rank_name
from kvpool.engine.messages import PoolMetadata, RankInfo, WorkerReport
from kvpool.engine.setup import EngineSetup, host_identity, open_store
from kvpool.engine.stats import PoolStats
from kvpool.engine.threads import WorkerThreads
from kvpool.engine.transfers import Outcome, Transfers
from kvpool.stores.base import Handle, Store

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

LOAD_THREADS = 2
CLOSE_SECONDS = 5.0


class WorkerSide:
    """``begin_step`` -> ``load_now`` -> forward -> ``start_saves`` -> ``take_*``, in the engine's thread; jobs end in others."""

    def __init__(self, setup: EngineSetup, device: Device) -> None:
        options = setup.options
        self._setup = setup
        self._store: Store | None = None
        self._transfers: Transfers | None = None
        self._info: RankInfo | None = None
        self._breaker = Breaker(options.breaker_failures, options.breaker_cooldown_ms / 1000)
        self._device = device
        self._loaders = WorkerThreads("load", LOAD_THREADS, device.bind_thread)
        self._savers = WorkerThreads("save", 1, device.bind_thread)
        self._lock = threading.Lock()
        self._stats = PoolStats()
        self._reports: dict[int, JobReport] = {}
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._bad_blocks: set[int] = set()
        # Jobs whose calls were given up but still use the blocks: (job, handles, what to report at the end).
        self._lingering: list[tuple[Job, list[Handle], JobReport]] = []
        self._met = False
        self._told_down = False
        self._asleep = False

    # ---- set-up -------------------------------------------------------------------------------------------------------------

    def register(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> None:
        layout = describe_caches(vllm_config, kv_config, caches, self._setup.options.cache_namespace)
        self._store = self._store or open_store(self._setup.options, layout.device)
        self._store.register(layout.regions)
        self._transfers = Transfers(self._store, layout.layouts)
        shards = tuple((one.group, str(one.shard), one.object_nbytes) for one in layout.layouts)
        self._info = RankInfo(rank_name(), layout.inputs, shards, host_identity(), layout.sharing)
        self._log_ready(layout)

    def _log_ready(self, layout: WorkerLayout) -> None:
        options, stats = self._setup.options, self._store.stats() if self._store is not None else None
        logger.info(
            "kvpool: store ready: backend=%s (%s), address=%s, tenant=default, qos=%s, capacity=%d bytes; rank %d holds %s",
            options.backend,
            options.backend_reason,
            f"{options.local_pool_root or '/dev/shm'}:{options.local_pool_name}",
            options.qos_priority,
            stats.capacity_bytes if stats is not None else 0,
            rank_name(),
            ", ".join(f"group {one.group} {one.shard}: {one.object_nbytes} bytes a block" for one in layout.layouts),
        )

    @property
    def info(self) -> RankInfo | None:
        return self._info

    # ---- a step -------------------------------------------------------------------------------------------------------------

    def begin_step(self, meta: PoolMetadata) -> None:
        self._met = self._met or bool(meta.namespace)

    def load(self, meta: PoolMetadata) -> None:
        """Run the step's synchronous loads and start the others."""
        for job in meta.loads:
            if job.is_async:
                self._in_background(self._loaders, job, None)
            else:
                self._end_load(job, self._attempt(job, None))

    def start_saves(self, meta: PoolMetadata) -> None:
        """After the forward: the blocks that this step filled are whole once its event has passed (one event a step)."""
        if not meta.saves:
            return
        written = self._device.record()
        for job in meta.saves:
            if self._asleep or not self._breaker.allow():
                self._report(job, JobReport(1, unsaved=block_names(job.parts)))
                self._count("dropped_blocks", job.num_blocks)
            else:
                self._in_background(self._savers, job, written)

    def _in_background(self, threads: WorkerThreads, job: LoadJob | SaveJob, written: Event | None) -> None:
        ticket = threads.submit(lambda: self._attempt(job, written))
        end = self._end_load if isinstance(job, LoadJob) else self._end_save
        ticket.then(lambda ended: end(job, ended.value or _all_failed(job)))  # type: ignore[arg-type]

    def _attempt(self, job: LoadJob | SaveJob, written: Event | None) -> Outcome:
        """Never raises: whatever goes wrong is a job whose every block has failed."""
        try:
            if self._asleep or self._transfers is None:
                raise RuntimeError("the KV caches are not registered")
            if written is not None:
                written.wait()
            return self._transfers.load(job) if isinstance(job, LoadJob) else self._transfers.save(job)
        except Exception:
            logger.exception("kvpool: job %d of request %s failed", job.job_id, job.request_id)
            return _all_failed(job)

    def _end_load(self, job: LoadJob, outcome: Outcome) -> None:
        names = [name for name, _ in outcome.failed]
        self._feed_breaker(_store_trouble(outcome))
        # The report comes first: the scheduler must know the failed blocks before the request asks again.
        self._finish(job, outcome, JobReport(1, failed=names))
        with self._lock:
            self._stats.aggregate(outcome.stats)
            if job.is_async:
                self._finished_loads.add(job.request_id)
                # Whole blocks before the first bad one are good, but only a model of one group can say which.
                if outcome.failed and (len(self._setup.groups) > 1 or outcome.running):
                    self._failed_loads.add(job.request_id)
                else:
                    self._bad_blocks.update(i for _, i in outcome.failed)
            elif outcome.failed:
                self._bad_blocks.update(i for _, i in outcome.failed)

    def _end_save(self, job: SaveJob, outcome: Outcome) -> None:
        self._feed_breaker(_store_trouble(outcome))
        with self._lock:
            self._stats.aggregate(outcome.stats)
        self._finish(job, outcome, JobReport(1, unsaved=[name for name, _ in outcome.failed]))

    def _finish(self, job: Job, outcome: Outcome, report: JobReport) -> None:
        if not outcome.running:
            self._report(job, report)
            return
        # What has failed is told now; that the blocks are free only when the calls have returned.
        with self._lock:
            self._reports.setdefault(job.job_id, JobReport()).merge(JobReport(0, report.unsaved, report.failed))
            self._lingering.append((job, outcome.running, JobReport(1)))

    def _report(self, job: Job, report: JobReport) -> None:
        with self._lock:
            self._reports.setdefault(job.job_id, JobReport()).merge(report)

    def _feed_breaker(self, failed: bool) -> None:
        self._breaker.failure() if failed else self._breaker.success()

    def _count(self, name: str, amount: float) -> None:
        with self._lock:
            self._stats.add(name, amount)

    # ---- what the engine takes away -----------------------------------------------------------------------------------------

    def take_finished_loads(self) -> tuple[set[str], set[str]]:
        """Request ids whose asynchronous load has ended, and those of them that failed whole."""
        with self._lock:
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
        down = self._breaker.state is not BreakerState.CLOSED
        if down and self._breaker.allow():
            self._loaders.submit(self._probe)
        greeting = [self._info] if self._info is not None and not self._met else []
        changed, self._told_down = down != self._told_down, down
        if not jobs and not greeting and not down and not changed:
            return None
        return WorkerReport(jobs, greeting, down)

    def _probe(self) -> None:
        """While the store is bypassed: see whether it is well again."""
        try:
            well = self._store is not None and self._store.health().ok
        except Exception:  # noqa: BLE001 - a store that raises here is not well
            well = False
        self._feed_breaker(not well)

    def take_stats(self) -> PoolStats | None:
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, PoolStats()
        taken.gauge("queued_jobs", self._loaders.backlog() + self._savers.backlog())
        taken.gauge("breaker_state", int(self._breaker.state))
        return taken

    def _reap(self) -> None:
        """Report the lingering jobs whose calls have returned at last."""
        with self._lock:
            lingering, self._lingering = self._lingering, []
            for job, handles, report in lingering:
                if all(handle.done() for handle in handles):
                    self._reports.setdefault(job.job_id, JobReport()).merge(report)
                else:
                    self._lingering.append((job, handles, report))

    # ---- sleep and shutdown -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """No transfer touches KV memory after this returns. Idempotent. TimeoutError when one cannot be ended."""
        self._asleep = True
        tickets = [self._loaders.submit(lambda: None) for _ in range(LOAD_THREADS)] + [self._savers.submit(lambda: None)]
        end = time.monotonic() + self._setup.options.load_timeout_ms / 1000
        for ticket in tickets:
            if not ticket.wait(end - time.monotonic()):
                raise TimeoutError("kvpool: a transfer is still running; the engine cannot sleep now")
        with self._lock:
            handles = [h for _, many, _ in self._lingering for h in many]
        if not all(handle.wait(end - time.monotonic()) for handle in handles):
            raise TimeoutError("kvpool: a store call is still using KV memory; the engine cannot sleep now")

    def wake(self) -> None:
        self._asleep = False

    def shutdown(self) -> None:
        """Finish what is queued, within a few seconds, then close the store. Idempotent."""
        self._loaders.close(CLOSE_SECONDS)
        self._savers.close(CLOSE_SECONDS)
        if self._store is not None:
            self._store.close()
            self._store = None


def _store_trouble(outcome: Outcome) -> bool:
    """Whether the store itself failed, as opposed to an object that is gone or a pool that is full."""
    return bool(outcome.running) or any(name.endswith(("=fatal", "=transient")) for name in outcome.stats.data)


def _all_failed(job: Job) -> Outcome:
    return Outcome(failed=list(zip(block_names(job.parts), job.block_ids, strict=True)))
