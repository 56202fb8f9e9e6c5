"""What is around the connector: the engine's deployment, and the MultiConnector whose child it may be."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvpool.options import Deployment, check_children
from kvpool.stores.context import device_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig


def describe_deployment(config: VllmConfig) -> Deployment:
    """The facts that rules of options depend on."""
    parallel, model = config.parallel_config, config.model_config
    return Deployment(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dp=parallel.data_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        eager=model.enforce_eager,
        num_layers=model.get_total_num_hidden_layers(),
        mla=model.use_mla,
        hash_algo=config.cache_config.prefix_caching_hash_algo,
        device=device_kind(config.device_config.device_type),
        local_ranks=parallel.local_world_size * parallel.data_parallel_size_local,
    )


def find_parent() -> KVTransferConfig | None:
    """The configuration of the MultiConnector that is making us; None where we are alone.

    vLLM 0.32 tells a child nothing of it, although its failure policy is the one that counts. Other plugins derive from it.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        maker: Any = frame.f_locals.get("self")
        frame = frame.f_back
        if any(cls.__name__ == "MultiConnector" for cls in type(maker).__mro__) and hasattr(maker, "_kv_transfer_config"):
            parent: KVTransferConfig = maker._kv_transfer_config
            return parent
    return None


def family_warnings(parent: KVTransferConfig | None) -> list[str]:
    """What a MultiConnector says about its children in vain; OptionError where we are in it twice."""
    return check_children({"kv_connector_extra_config": parent.kv_connector_extra_config}) if parent is not None else []
