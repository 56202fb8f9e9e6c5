"""MooncakeConnectorV1: vLLM's connector interface over the sides of prefill and decode."""

from __future__ import annotations

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
from kvpool.engine.hash_probe import hash_probe
from kvpool.engine.p2p.decode_side import DecodeSide
from kvpool.engine.p2p.messages import TransferMetadata, TransferReport
from kvpool.engine.p2p.prefill_side import PrefillSide
from kvpool.engine.p2p.setup import read_pull_setup
from kvpool.engine.p2p.stats import TransferPromMetrics, TransferStats
from kvpool.engine.p2p.worker import TransferWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class MooncakeConnectorV1(KVConnectorBase_V1, SupportsHMA):
    """One object per role: vLLM makes one in the engine core and one in each worker."""

    _cache_hit_source = CacheHitSource.P2P

    @unbound()
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        setup = read_pull_setup(vllm_config, kv_cache_config, log=role == KVConnectorRole.SCHEDULER)
        self._prefill: PrefillSide | None = None
        self._decode: DecodeSide | None = None
        self._worker: TransferWorker | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = TransferWorker(setup, device_of(vllm_config.device_config.device_type))
            return
        probe = hash_probe(vllm_config.cache_config.prefix_caching_hash_algo)
        if setup.producer:
            self._prefill = PrefillSide(setup, probe)
        else:
            self._decode = DecodeSide(setup, probe)

    @property
    def transfer_worker(self) -> TransferWorker:
        assert self._worker is not None, "not a worker's connector"
        return self._worker

    @property
    def side(self) -> PrefillSide | DecodeSide:
        side = self._prefill or self._decode
        assert side is not None, "not the scheduler's connector"
        return side

    # ---- worker -------------------------------------------------------------------------------------------------------------

    @unbound()
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.transfer_worker.register(self._vllm_config, self._kv_cache_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, TransferMetadata)
        self.transfer_worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        if isinstance(self._connector_metadata, TransferMetadata):
            self.transfer_worker.pull(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests run when their KV is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing to do: whole requests are offered once they have finished."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: the scheduler keeps the blocks."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, failed = self.transfer_worker.take_finished()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM asks ``get_transfer_results`` instead, which tells failed pulls too."""
        raise NotImplementedError("kvpool reports transfers through get_transfer_results")

    def build_connector_worker_meta(self) -> TransferReport | None:
        return self.transfer_worker.take_report()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """False: others read the memory that would go."""
        return False

    # ---- scheduler ----------------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._prefill is not None:
            self._prefill.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Another child's of a MultiConnector: our ranks introduce themselves in their first report."""

    def on_new_request(self, request: Request) -> None:
        if self._decode is not None:
            self._decode.greet(request)
        elif self._prefill is not None:
            self._prefill.greet(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._decode.matched_tokens(request, num_computed_tokens) if self._decode is not None else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._decode is not None:
            self._decode.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.side.plan_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.side.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays: blocks on offer are pinned by themselves."""
        if self._prefill is not None:
            return False, self._prefill.finished(request, block_ids)
        if self._decode is not None:
            self._decode.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._prefill is not None and self._prefill.busy()

    def has_pending_block_frees(self) -> bool:
        """Copies end soon; what waits for a decode engine may wait long, and is not worth waiting for."""
        return self._prefill is not None and self._prefill.busy()

    def reset_cache(self) -> bool | None:
        return self._prefill.reset() if self._prefill is not None else True

    # ---- both ---------------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._worker is not None:
            return self._worker.take_stats()
        return self.side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferPromMetrics:
        return TransferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        (self._prefill or self._decode or self.transfer_worker).shutdown()
