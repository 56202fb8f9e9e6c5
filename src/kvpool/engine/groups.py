"""From vLLM's KV-cache groups to ours; groups that cannot be pooled are refused at start, by name and with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool.core.hits import GroupKind, GroupSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def pool_groups(config: KVCacheConfig) -> list[GroupSpec]:
    """One ``GroupSpec`` per group, in order. ValueError naming the group where one cannot be pooled."""
    unit = config.hash_block_size
    if unit is None:
        raise ValueError("kvpool needs vLLM 0.32 or newer: the KV-cache configuration has no hash_block_size")
    return [_pool_group(i, group, unit) for i, group in enumerate(config.kv_cache_groups)]


def _pool_group(index: int, group: KVCacheGroupSpec, unit: int) -> GroupSpec:
    specs: list[KVCacheSpec] = [group.kv_cache_spec]
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        specs = list(group.kv_cache_spec.kv_cache_specs.values())
    shapes = {_kind_and_window(index, group, spec) for spec in specs}
    if len(shapes) != 1:
        raise ValueError(f"KV-cache group {index} mixes attention kinds {sorted(map(str, shapes))}: it cannot be pooled")
    size = group.kv_cache_spec.block_size
    if size % unit:
        raise ValueError(f"KV-cache group {index} has blocks of {size} tokens, not a multiple of the hash block of {unit}")
    kind, window = shapes.pop()
    return GroupSpec(block_size=size, units=size // unit, kind=kind, window=window)


def _kind_and_window(index: int, group: KVCacheGroupSpec, spec: KVCacheSpec) -> tuple[GroupKind, int]:
    def refuse(reason: str) -> ValueError:
        return ValueError(f"KV-cache group {index} ({type(spec).__name__}, {group.layer_names[0]}, ...) cannot be pooled: {reason}")

    if isinstance(spec, MambaSpec):
        raise refuse(
            "a recurrent state stands at the end of a block only with mamba_cache_mode=align, and pooling it there is not built yet"
        )
    if not group.enable_kv_transfer or not spec.prefix_cacheable:
        raise refuse("vLLM gives it no block hashes")
    if isinstance(spec, RSWASpec | HiddenStateCacheSpec):
        raise refuse("its contents depend on more than the tokens before it")
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.SLIDING, spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.CHUNKED, spec.attention_chunk_size
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, 0
    raise refuse("its attention kind is not known")
