"""`additional_config.sparse_kv_offload_config`: sparse KV offload on the decode side."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.scalars import Bool, integer

SECTION = "sparse_kv_offload_config"
VALIDATED_MODELS = ("deepseek_v32", "glm_moe_dsa")
"""Model types of DeepSeek-V3.2 and of GLM-5.1 and GLM-5.2."""


class SparseOptions(OptionModel):
    """Sparse decode offload: the full KV cache in host memory, the rows in use on the device."""

    enabled: Bool = Field(False, description="Switch it on (a kv_consumer only). Not available yet.")
    topk_buffer_size: Annotated[int, integer(1)] = Field(
        4096,
        description="Rows of the device buffer: at least index_topk, a multiple of block_size. Start with twice index_topk.",
    )
    dram_size_per_dp_gb: Annotated[int, integer(1)] = Field(
        128,
        alias="dram_size_per_dp_GB",
        description="Host memory per DP rank in GB, shared by its TP ranks; holds the whole KV cache.",
    )
    keep_device_kv_cache: Bool = Field(False, description="For debugging: keep the full cache on the device too.")


def read_sparse(additional: Mapping[str, object], kv_role: str, deployment: Deployment) -> Reading[SparseOptions]:
    """The section of ``additional_config``, which belongs to everybody: other keys are not judged unless they look like ours."""
    near = [key for key in additional if key != SECTION and difflib.get_close_matches(str(key), [SECTION], n=1, cutoff=0.8)]
    warnings = [f"additional_config: unknown key {key!r} is ignored: did you mean {SECTION}?" for key in near]
    raw = additional.get(SECTION)
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise OptionError(SECTION, raw, "expected an object", where="additional_config")
    reading = read_fields(SparseOptions, raw, where=SECTION)
    warnings += reading.warnings
    if reading.options.enabled:
        _check_deployment(reading.options, kv_role, deployment)
        if deployment.model_type is not None and deployment.model_type not in VALIDATED_MODELS:
            warnings.append(f"{SECTION}: model type {deployment.model_type} has not been validated with sparse decode offload")
    return Reading(reading.options, warnings, reading.sources)


def _check_deployment(options: SparseOptions, kv_role: str, deployment: Deployment) -> None:
    def refuse(reason: str, key: str = "enabled", value: object = True) -> OptionError:
        return OptionError(key, value, reason, where=SECTION)

    if kv_role != "kv_consumer":
        raise refuse(f"works on a kv_consumer only, not on a {kv_role}")
    if deployment.model_runner == 2:
        raise refuse("needs model runner V1")
    if (deployment.pp or 1) > 1:
        raise refuse("does not work with pipeline parallelism")
    if deployment.context_parallel:
        raise refuse("does not work with context parallelism")
    if deployment.compressed_kv:
        raise refuse("does not work with models that compress their KV cache")
    if deployment.index_topk == 0 or deployment.mla is False:
        raise refuse("needs a model with sparse attention (index_topk)")
    if deployment.kv_dtype not in (None, "auto", "bfloat16"):
        raise refuse(f"needs a bfloat16 KV cache, not {deployment.kv_dtype}")
    key, rows = "topk_buffer_size", options.topk_buffer_size
    if deployment.index_topk is not None and rows < deployment.index_topk:
        raise refuse(f"must be at least index_topk={deployment.index_topk}", key, rows)
    if deployment.block_size is not None and rows % deployment.block_size:
        raise refuse(f"must be a multiple of block_size={deployment.block_size}", key, rows)
