"""What an engine of the harness is made of, and the vLLM configuration that says so."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

WORDS = 4  # int64 numbers per token and head
HEAD_SIZE = WORDS  # float32: K and V of one head are 2 * HEAD_SIZE numbers of 4 bytes, which is WORDS int64
FULL = ("full", 0)
# Waits are long and memories short, so that what a test sees does not depend on how fast the machine is.
OPTIONS: dict[str, Any] = {
    "backend": "local",
    "cache_namespace": "contract",
    "lookup_wait_ms": 1000,
    "lookup_timeout_ms": 5000,
    "max_pinned_save_percent": 90,
}


@dataclass(frozen=True)
class Spec:
    """``groups`` are (kind, window) of each KV-cache group; every group has ``layers`` layers."""

    groups: tuple[tuple[str, int], ...] = (FULL,)
    layers: int = 2
    heads: int = 2
    block_size: int = 16
    hash_block_size: int | None = None
    num_blocks: int = 64
    max_tokens_per_step: int = 64
    max_seqs: int = 8
    prefix_caching: bool = True
    load_async: bool = False
    policy: str = "fail"  # the only one with which loads may be synchronous
    tp: int = 1
    pp: int = 1
    role: str = "kv_both"
    drafts: int = 0
    draft_layers: int = 0  # how many of the last layers are a drafter's, unknown to the model's configuration
    kv_events: bool = False
    rival: str | None = None  # "first" or "last": a second connector inside a MultiConnector; "twin": ours twice
    child: Mapping[str, Any] = field(default_factory=dict)  # more keys for our entry inside a MultiConnector
    hash_algorithm: str = "sha256"
    pull: Mapping[str, Any] | None = None  # extra config of MooncakeConnectorV1, which then is the connector
    port: int = 14579
    beside: str | None = None  # "first" or "last": where AscendStoreConnector stands in a MultiConnector with it
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def num_layers(self) -> int:
        return self.layers * len(self.groups)

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.heads // self.tp)

    def layers_of(self, group: int, stage: int) -> list[int]:
        """Model layers of a group on one pipeline stage: layer i belongs to group i % groups."""
        each = self.num_layers // self.pp
        return [i for i in range(stage * each, (stage + 1) * each) if i % len(self.groups) == group]


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


@functools.cache
def _model_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kvpool-contract-"))
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 2048,
        "max_position_embeddings": 65536,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def adapter_folder(name: str) -> str:
    """The files of an adapter: its name is all that is in them."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-adapter-"))
    (folder / "adapter_config.json").write_text(json.dumps({"name": name}))
    (folder / "adapter_model.bin").write_bytes(name.encode() * 100)
    return str(folder)


@functools.cache
def _base_model() -> ModelConfig:
    return ModelConfig(model=str(_model_folder()), skip_tokenizer_init=True, dtype="float32", enforce_eager=True)


def _model(spec: Spec) -> ModelConfig:
    model = copy.copy(_base_model())
    model.model_arch_config = copy.copy(model.model_arch_config)
    model.model_arch_config.total_num_kv_heads = spec.heads
    model.model_arch_config.total_num_hidden_layers = spec.num_layers - spec.draft_layers
    return model


def _transfer(spec: Spec) -> KVTransferConfig:
    ours = {
        "kv_connector": "AscendStoreConnector",
        "kv_connector_module_path": "kvpool.engine",
        "kv_role": spec.role,
        "kv_connector_extra_config": {**OPTIONS, "load_async": spec.load_async, **spec.options},
    }
    if spec.pull is not None:
        return _pull_transfer(spec, ours)
    if spec.rival is None:
        return KVTransferConfig(**ours, kv_load_failure_policy=spec.policy)
    other = {"kv_connector": "RivalConnector", "kv_connector_module_path": "tests.contract.rival", "kv_role": "kv_both"}
    ours |= spec.child
    children = {"first": [other, ours], "last": [ours, other], "twin": [ours, ours]}[spec.rival]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=spec.policy,
        kv_connector_extra_config={"connectors": children},
    )


def _pull_transfer(spec: Spec, pool: dict[str, Any]) -> KVTransferConfig:
    pull = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_connector_module_path": "kvpool.engine",
        "kv_role": spec.role,
        "kv_port": str(spec.port),
        "kv_connector_extra_config": dict(spec.pull or {}),
    }
    if spec.beside is None:
        return KVTransferConfig(**{**pull, "kv_port": spec.port}, kv_load_failure_policy=spec.policy)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=spec.role,
        kv_load_failure_policy=spec.policy,
        kv_connector_extra_config={"connectors": [pool, pull] if spec.beside == "first" else [pull, pool]},
    )


def vllm_config(spec: Spec) -> VllmConfig:
    config = VllmConfig(
        model_config=_model(spec),
        cache_config=CacheConfig(
            block_size=spec.block_size,
            enable_prefix_caching=spec.prefix_caching,
            prefix_caching_hash_algo=spec.hash_algorithm,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=spec.max_seqs,
            max_num_batched_tokens=spec.max_tokens_per_step,
            max_model_len=65536,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=ParallelConfig(distributed_executor_backend="mp"),
        kv_transfer_config=_transfer(spec),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=spec.kv_events, publisher="null"),
    )
    # Set afterwards: the configuration would check them against the devices of this machine.
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size = spec.tp, spec.pp, spec.ranks
    config.cache_config.num_gpu_blocks = spec.num_blocks
    return config


def _group_spec(spec: Spec, kind: str, window: int) -> KVCacheSpec:
    common = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.heads_per_rank,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    if kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=window)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)
    return FullAttentionSpec(**common)


def kv_cache_config(spec: Spec, stage: int = 0) -> KVCacheConfig:
    """As the scheduler (stage 0) and the workers of a pipeline stage see it."""
    groups = [
        KVCacheGroupSpec([layer_name(i) for i in spec.layers_of(index, stage)], _group_spec(spec, kind, window))
        for index, (kind, window) in enumerate(spec.groups)
    ]
    return KVCacheConfig(
        num_blocks=spec.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=spec.hash_block_size or spec.block_size,
    )
