"""A second connector for MultiConnector: it can load everything or nothing, asynchronously, and keeps what it saves to itself."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


class RivalMetadata(KVConnectorMetadata):
    def __init__(self, loads: list[str]) -> None:
        self.loads = loads


class RivalConnector(KVConnectorBase_V1, SupportsHMA):
    """``offer`` is how many tokens beyond the engine's own it claims; the harness fills the blocks before it reports."""

    offer: ClassVar[int] = 0
    filler: ClassVar[Any] = None  # called with the request ids whose blocks are to hold right KV now

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: list[str] = []
        self._done: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        most = (request.num_tokens - 1) // 16 * 16 - num_computed_tokens
        tokens = max(0, min(self.offer, most))
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return RivalMetadata(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, RivalMetadata)
        if self._connector_metadata.loads:
            type(self).filler(self._connector_metadata.loads)
        self._done |= set(self._connector_metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def register_kv_caches(self, kv_caches: Any) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, self._done = self._done, set()
        return KVConnectorTransferResults(finished_recving=done)
