"""AscendStoreConnector: vLLM's connector interface over the scheduler side and the worker side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.devices import device_of
from kvpool.devices.affinity import unbound
from kvpool.engine.agreement import Agreement
from kvpool.engine.hash_probe import hash_probe
from kvpool.engine.kv_events import kv_events_for
from kvpool.engine.messages import PoolHandshake, PoolMetadata, WorkerReport
from kvpool.engine.opening import open_store
from kvpool.engine.scheduler_side import SchedulerSide
from kvpool.engine.setup import host_identity, read_setup
from kvpool.engine.stats import PoolPromMetrics, PoolStats
from kvpool.engine.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

NAME = "AscendStoreConnector"


class AscendStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The pool connector. One object per role: vLLM makes one in the engine core and one in each worker."""

    _cache_hit_source = CacheHitSource.HOST

    @unbound()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        setup = read_setup(vllm_config, kv_cache_config, log=role == KVConnectorRole.SCHEDULER)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            store = open_store(setup, "scheduler", vllm_config.device_config.device_type)
            probe = hash_probe(vllm_config.cache_config.prefix_caching_hash_algo)
            host_bound = store.capabilities.host_bound
            agreement = Agreement(setup.world_size, len(setup.groups), probe, host_identity(), host_bound, setup.record)
            events = kv_events_for(vllm_config, kv_cache_config, host_bound)
            self._scheduler = SchedulerSide(setup, store, agreement, events)
        else:
            self._worker = WorkerSide(setup, device_of(vllm_config.device_config.device_type))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save is a later miss, nothing more."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "not the scheduler's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "not a worker's connector"
        return self._worker

    # ---- worker -------------------------------------------------------------------------------------------------------------

    @unbound()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        info = self.worker_side.info
        return PoolHandshake({NAME: info}) if info is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PoolMetadata)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        if isinstance(self._connector_metadata, PoolMetadata):
            self.worker_side.load(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: whole-block loads have ended before the forward."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing to do: whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        if isinstance(self._connector_metadata, PoolMetadata):
            self.worker_side.start_saves(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        meta = self._connector_metadata
        done, failed = self.worker_side.take_finished_loads(meta.patience_s if isinstance(meta, PoolMetadata) else 0.0)
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM asks ``get_transfer_results`` instead, which tells failed loads too."""
        raise NotImplementedError("kvpool reports transfers through get_transfer_results")

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker_side.take_report()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33, before the engine sleeps: no transfer touches KV memory after this returns."""
        self.worker_side.sleep()

    def restore_kv_caches(self) -> None:
        """vLLM 0.33, after wake-up; the KV memory is where it was."""
        self.worker_side.wake()

    # ---- scheduler ----------------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Ranks whose handshake is another connector's (first child of a MultiConnector) introduce themselves in a report."""
        for handshake in metadata.values():
            if isinstance(handshake, PoolHandshake) and NAME in handshake.entries:
                self.scheduler_side.meet(handshake.entries[NAME])

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.greet(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.finished(request)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays: blocks of open jobs are pinned by themselves."""
        self.scheduler_side.finished(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_side.take_events()

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return hit_sources(self.scheduler_side.hit_sources(request), num_external_tokens)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.busy()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.will_free_blocks()

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset()

    # ---- both ---------------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PoolStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else self.worker_side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        return PoolStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        (self._scheduler or self.worker_side).shutdown()


SOURCES = {"dram": CacheHitSource.HOST, "remote": CacheHitSource.P2P, "disk": CacheHitSource.DISK}


def hit_sources(tiers: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
    """vLLM's names for tokens by tier; all unspecified where they are not the tokens that vLLM means."""
    if not tokens:
        return {}
    if sum(tiers.values()) != tokens:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens}
    return {SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED): count for tier, count in tiers.items()}
