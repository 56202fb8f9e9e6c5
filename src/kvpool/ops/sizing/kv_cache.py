"""Bytes of the KV cache: of a token, of a block in the pool, of a block of the engine's, on a rank and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.shards import head_span, layer_partition
from kvpool.ops.sizing.figures import OFFLOAD, OWN, VLLM, Section
from kvpool.ops.sizing.layers import LayerKind
from kvpool.ops.sizing.model import ModelShape
from kvpool.ops.sizing.plan import Plan
from kvpool.options import OptionError

ELEMENT_BYTES = {"auto": 2, "float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
FP8_DS_MLA = 656
"""Bytes per token of vLLM's packed format: 512 fp8 values, 4 float32 scales, 64 bfloat16 values."""
INDEXER_GROUP = 128
"""Values of an indexer's fp8 key that share a float32 scale."""
KV_DTYPES = (*ELEMENT_BYTES, "fp8_ds_mla")
INDEXER_DTYPES = ("fp8", "float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes per token of single layers on one rank, and which layers a rank holds."""

    shape: ModelShape
    heads: int
    main: int
    main_formula: str
    indexer: int
    stages: tuple[range, ...]

    def layer(self, index: int) -> int:
        """Bytes per token of a layer on one rank."""
        return self.main + (self.indexer if self.shape.indexers[index] else 0)

    @property
    def per_token_rank(self) -> int:
        """Of the rank (pipeline stage) that holds the most."""
        return max(sum(map(self.layer, stage)) for stage in self.stages)

    @property
    def per_token_pool(self) -> int:
        """All ranks' bytes, what several ranks hold alike counted once."""
        shards = self.shape.kv_heads // self.heads
        return sum(self.main * shards + (self.indexer if has else 0) for has in self.shape.indexers)


def kv_bytes(shape: ModelShape, plan: Plan) -> KvBytes:
    """OptionError where data type, tensor or pipeline parallelism do not fit the model."""
    try:
        span = head_span(shape.kv_heads, plan.tp, 0)
        stages = tuple(layer_partition(len(shape.layers), plan.pp))
    except ValueError as error:
        raise OptionError("--tp", plan.tp, str(error)) from None
    if any(len(stage) == 0 for stage in stages):
        raise OptionError("--pp", plan.pp, f"is more than the {len(shape.layers)} layers with a KV cache")
    heads = span.last - span.first + 1
    if plan.kv_dtype == "auto" and shape.quantized_kv:
        raise OptionError("--kv-dtype", "auto", "the checkpoint names a data type for the KV cache: say which, as --kv-dtype fp8")
    if plan.kv_dtype == "fp8_ds_mla":
        if not shape.mla:
            raise OptionError("--kv-dtype", plan.kv_dtype, "is a format of latent (MLA) caches; use fp8")
        main, formula = FP8_DS_MLA, f"{FP8_DS_MLA} bytes (fp8_ds_mla)"
    else:
        size = ELEMENT_BYTES[plan.kv_dtype]
        main = heads * shape.width * size
        parts = f"{shape.width} (latent + rope)" if shape.mla else f"{heads} KV heads x {shape.width} (K and V)"
        formula = f"{parts} x {size} bytes"
    return KvBytes(shape, heads, main, formula, indexer_bytes(shape, plan.indexer_dtype), stages)


def indexer_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes per token of one indexer's key cache; 0 for a model without."""
    if dtype == "fp8":
        return shape.index_head_dim + shape.index_head_dim // INDEXER_GROUP * 4
    return shape.index_head_dim * ELEMENT_BYTES[dtype]


def groups(shape: ModelShape) -> list[tuple[int, ...]]:
    """The layers of each KV-cache group, as vLLM 0.32 makes them: kinds apart, and equally many layers in each group."""
    buckets = [tuple(i for i, one in enumerate(shape.layers) if one is kind) for kind in LayerKind]
    buckets = [bucket for bucket in buckets if bucket]
    if len(buckets) == 1:
        return buckets
    least, most = min(map(len, buckets)), max(map(len, buckets))
    size = most if most < least * 1.5 else least
    made: list[tuple[int, ...]] = []
    for bucket in buckets:
        count = -(-len(bucket) // size)
        made += [bucket[i::count] for i in range(count)]
    return made


def engine_block_bytes(kv: KvBytes, block_size: int) -> int:
    """Bytes of one block in the engine's own KV memory on the fullest rank: the widest group's, since groups share blocks."""

    def width(group: Sequence[int], stage: range) -> int:
        return sum(kv.layer(index) for index in group if index in stage) * block_size

    return max(width(group, stage) for group in groups(kv.shape) for stage in kv.stages)


def kv_section(shape: ModelShape, kv: KvBytes, plan: Plan) -> Section:
    """KV bytes per token and block, and of the whole workload."""
    section = Section(f"KV cache: {shape.attention}, {len(shape.layers)} layers, {plan.kv_dtype}")
    indexers = sum(shape.indexers)
    extra = f" + {indexers} indexers x {kv.indexer}" if indexers else ""
    most = max(len(stage) for stage in kv.stages)
    stage = f"{most} layers of the largest pipeline stage" if plan.pp > 1 else f"{most} layers"
    rank = kv.per_token_rank
    plus = " + those layers' indexers" if indexers and plan.pp > 1 else extra
    section.add("kv_bytes_per_token_rank", rank, "bytes", f"{stage} x {kv.main_formula}{plus}", VLLM)
    shards = shape.kv_heads // kv.heads
    once = f"{len(shape.layers)} layers x {shards} x {kv.main_formula}{extra}; what ranks hold alike is stored once"
    pool = kv.per_token_pool
    section.add("kv_bytes_per_token", pool, "bytes", once, OWN)
    section.add("kv_bytes_per_block", pool * plan.block_size, "bytes", f"{pool} x block of {plan.block_size} tokens", OWN)
    count = len(groups(shape))
    section.add("kv_cache_groups", count, "count", "layers of one kind make groups of equally many layers", VLLM)
    block = engine_block_bytes(kv, plan.block_size)
    engine = f"bytes of a block on a rank: the group with the most, of {count}" if count > 1 else f"{rank} x {plan.block_size}"
    section.add("engine_bytes_per_block", block, "bytes", engine, VLLM)
    total = plan.blocks * plan.block_size * pool
    formula = f"{plan.concurrency} sequences x {plan.tokens} tokens in whole blocks x {pool}"
    section.add("kv_bytes_total", total, "bytes", formula, f"{OFFLOAD}, 1 (dram.size)")
    device = plan.blocks_per_engine * plan.block_size * rank
    slide = "; less with sliding layers" if count > 1 or LayerKind.FULL not in shape.layers else ""
    formula = f"{plan.sequences_per_engine} sequences of an engine x {plan.tokens} tokens in whole blocks x {rank}{slide}"
    section.add("kv_bytes_on_rank", device, "bytes", formula, VLLM)
    if 0 < shape.max_tokens < plan.tokens:
        text = f"{plan.tokens} tokens are more than the {shape.max_tokens} that the model takes (max_position_embeddings)"
        section.warning("--tokens", text, "size for fewer tokens, or give the engine's overrides with --hf-overrides")
    return section
