"""MooncakeConnectorV1 in a worker: copies what decode will fetch (prefill), pulls what requests wait for (decode)."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.devices import Device, Event
from kvpool.engine.cache_layout import WorkerLayout, describe_caches, rank_name
from kvpool.engine.log_gate import LogGate
from kvpool.engine.messages import RankInfo
from kvpool.engine.p2p.layouts import rank_layout
from kvpool.engine.p2p.messages import Introduction, PublishJob, PullJob, TransferMetadata, TransferReport
from kvpool.engine.p2p.setup import PullSetup
from kvpool.engine.p2p.stats import TransferStats
from kvpool.engine.setup import host_identity
from kvpool.engine.stats import labelled
from kvpool.engine.threads import Ticket, WorkerThreads
from kvpool.stores.base import Batch, Status
from kvpool.transfer import TransferEngine, build_engine
from kvpool.transfer.base import StagedEngine
from kvpool.transfer.channel import Caller
from kvpool.transfer.messages import RankLayout
from kvpool.transfer.names import choice_of, object_keys
from kvpool.transfer.plan import publishes
from kvpool.transfer.pull import Puller, PullError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

PULL_THREADS = 4
ROOM_S = 2.0  # how long a transfer may wait for others to be read before it is refused
ROOM_RETRY_S = 0.02  # at first, then doubled: each try copies until there is no room
CLOSE_SECONDS = 3.0


class TransferWorker:
    """``begin_step`` -> ``pull`` -> ``take_*`` in the engine's thread; copies run in others."""

    def __init__(self, setup: PullSetup, device: Device) -> None:
        self._setup = setup
        self._device = device
        self._engine: TransferEngine | None = None
        self._layout: WorkerLayout | None = None
        self._described: RankLayout | None = None
        self._introduction: Introduction | None = None
        self._met = not setup.producer  # decode's scheduler need not know
        self._puller: Puller | None = None
        self._caller = Caller(setup.secret.value)
        self._threads = WorkerThreads("transfer", 1 if setup.producer else PULL_THREADS, device.bind_thread)
        self._withdrawals = WorkerThreads("withdraw", int(setup.producer))  # of its own: a copy may wait for the room that it makes
        self._lock = threading.Lock()
        self._running = 0
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._published: dict[str, list[str]] = {}
        self._stats = TransferStats()
        self._log = LogGate()

    def register(self, vllm_config: VllmConfig, kv_config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> None:
        setup = self._setup
        layout = describe_caches(vllm_config, kv_config, caches, setup.options.cache_namespace)
        engine = self._engine or build_engine(setup.engine, setup.engine_settings(layout.device))
        if self._engine is None:
            engine.open(layout.regions)
        self._engine, self._layout, rank = engine, layout, rank_name()
        address = engine.address() if setup.producer else b""
        self._described = rank_layout(layout, caches, kv_config.num_blocks, rank, address)
        shards = tuple((one.group, str(one.shard), one.object_nbytes) for one in layout.layouts)
        info = RankInfo(rank, layout.inputs, shards, host_identity(), layout.sharing)
        self._introduction = Introduction(info, self._described)

    # ---- prefill ------------------------------------------------------------------------------------------------------------

    def begin_step(self, meta: TransferMetadata) -> None:
        """What finished before this step is whole once its event has passed."""
        self._met = self._met or meta.met
        if meta.withdraws:
            engine = self._engine
            assert isinstance(engine, StagedEngine)
            self._withdrawals.submit(lambda: [engine.withdraw(transfer_id) for transfer_id in meta.withdraws])
        if meta.publishes:
            written = self._device.record()
            for job in meta.publishes:
                self._start()
                wait_until = time.monotonic() + ROOM_S
                ticket = self._threads.submit(lambda job=job, until=wait_until: self._publish(job, written, until))  # type: ignore[misc]
                ticket.then(lambda ended, job=job: self._published_one(job, _failure(ended)))  # type: ignore[misc]

    def _publish(self, job: PublishJob, written: Event, wait_until: float) -> str:
        """What went wrong; "" where all that this rank publishes has been copied."""
        began = time.monotonic()
        written.wait()
        failure = self._copy_out(job, wait_until)
        logger.debug("kvpool: transfer %s: published in %.1f ms", job.transfer_id, (time.monotonic() - began) * 1000)
        return failure

    def _published_one(self, job: PublishJob, failure: str) -> None:
        """Whatever happened, also where the task never ran, prefill's scheduler is told of once."""
        if failure and (more := self._log.ask("publish")) is not None:
            logger.error("kvpool: transfer %s could not be published: %s%s", job.transfer_id, failure, more)
        with self._lock:
            self._running -= 1
            self._published.setdefault(job.transfer_id, []).append(failure)

    def _copy_out(self, job: PublishJob, wait_until: float) -> str:
        engine, layout, described = self._engine, self._layout, self._described
        assert isinstance(engine, StagedEngine)
        assert layout is not None
        assert described is not None
        end, choice = time.monotonic() + self._setup.deadline_s, choice_of(job.transfer_id)
        for index, (span, one) in enumerate(zip(described.spans, layout.layouts, strict=True)):
            blocks = [(i, block) for i, block in enumerate(job.tables[span.group]) if block]
            if not blocks or not publishes(span, choice):
                continue
            keys = object_keys(job.transfer_id, described.rank, index, [i for i, _ in blocks])
            batch = Batch(keys, one.addresses([block for _, block in blocks]), one.sizes)
            result = engine.publish(job.transfer_id, batch, max(0.0, end - time.monotonic()))
            pause = ROOM_RETRY_S
            while result.status is Status.NO_SPACE and time.monotonic() + pause < wait_until:
                time.sleep(pause)
                pause *= 2
                result = engine.publish(job.transfer_id, batch, max(0.0, end - time.monotonic()))
            if result.status is Status.NO_SPACE:
                return f"no space for {len(blocks) * one.object_nbytes} bytes: raise transfer_buffer_size, or room in shared memory"
            if result.status is not Status.OK:
                return f"{result.status.value} {result.text}"
        return ""

    # ---- decode -------------------------------------------------------------------------------------------------------------

    def pull(self, meta: TransferMetadata) -> None:
        for job in meta.pulls:
            self._start()
            ticket = self._threads.submit(lambda job=job: self._pull(job, meta.probe))  # type: ignore[misc]
            ticket.then(lambda ended, job=job: self._pulled(job, _failure(ended)))  # type: ignore[misc]

    def _pull(self, job: PullJob, probe: str) -> str:
        """What went wrong; "" where the blocks hold prefill's KV."""
        began = time.monotonic()
        try:
            nbytes = self._meet_puller(probe).pull(job.offer, job.pull, job.prompt, job.wanted, self._setup.deadline_s)
        except PullError as error:
            return str(error)
        seconds = time.monotonic() - began
        with self._lock:
            self._stats.add("pulled_bytes", nbytes)
            self._stats.observe("pull_seconds", seconds)
        logger.debug("kvpool: request %s: %d bytes pulled in %.1f ms", job.request_id, nbytes, seconds * 1000)
        return ""

    def _pulled(self, job: PullJob, failure: str) -> None:
        """Whatever happened, the request is told of once."""
        if failure and (more := self._log.ask("pull")) is not None:
            logger.error(
                "kvpool: the KV of request %s was not pulled: %s (kv_load_failure_policy: %s)%s",
                job.request_id,
                failure,
                self._setup.policy,
                more,
            )
        with self._lock:
            self._running -= 1
            self._finished.add(job.request_id)
            self._stats.add(labelled("pulls", reason="failed" if failure else "ok"))
            if failure:
                self._failed.add(job.request_id)

    def _meet_puller(self, probe: str) -> Puller:
        with self._lock:
            if self._puller is None:
                engine, layout, described = self._engine, self._layout, self._described
                if engine is None or layout is None or described is None:
                    raise PullError("the KV caches are not registered")
                epoch = f"private-{secrets.token_hex(8)}" if layout.sharing else layout.inputs.epoch
                record = replace(layout.inputs, hash_probe=probe, epoch=epoch).to_json()
                self._puller = Puller(engine, self._caller, described, self._setup.tp_size, record, self._setup.pool)
            return self._puller

    # ---- what the engine takes away -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            self._running += 1

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Request ids whose pull has ended, and those of them that failed."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def take_report(self) -> TransferReport | None:
        with self._lock:
            published, self._published = self._published, {}
        introductions = [self._introduction] if self._introduction is not None and not self._met else []
        return TransferReport(introductions, published) if published or introductions else None

    def take_stats(self) -> TransferStats | None:
        with self._lock:
            taken, self._stats = self._stats, TransferStats()
        return None if taken.is_empty() else taken

    def open_counts(self) -> dict[str, int]:
        """Sizes of all tables: every one is 0 when the engine is idle."""
        return {"running": self._running, "finished": len(self._finished), "published": len(self._published)}

    def shutdown(self) -> None:
        """Finish what is queued, within a few seconds. Idempotent."""
        quiet = self._threads.close(CLOSE_SECONDS) and self._withdrawals.close(CLOSE_SECONDS)
        self._caller.close()
        if self._engine is not None and quiet:
            self._engine.close()


def _failure(ended: Ticket[str]) -> str:
    """What went wrong with a pull or copy, also where it was nothing that they know of."""
    if ended.error is not None:
        return f"{type(ended.error).__name__}: {ended.error}"
    return ended.value if ended.value is not None else "it was never begun"
