"""From a worker's KV-cache tensors to block layouts and to what shapes their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.models.utils import extract_layer_index

from kvpool.core.keys import Shard
from kvpool.core.layout import BlockLayout, PageRun, page_geometry
from kvpool.core.namespace import NamespaceInputs
from kvpool.core.shards import HeadSpan, head_span
from kvpool.engine.groups import pool_groups
from kvpool.engine.identity import model_identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class WorkerLayout:
    """All that a worker knows of its KV memory. ``regions`` are (address, nbytes) of the distinct allocations."""

    layouts: tuple[BlockLayout, ...]
    inputs: NamespaceInputs
    regions: tuple[tuple[int, int], ...]
    device: str
    sharing: str  # why this KV must not be shared with other engines; empty when it may


def describe_caches(
    vllm_config: VllmConfig, kv_config: KVCacheConfig, caches: Mapping[str, torch.Tensor], cache_namespace: str | None
) -> WorkerLayout:
    """ValueError in one line where the caches cannot be pooled."""
    groups = pool_groups(kv_config)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    heads = _heads(vllm_config)
    layouts: list[BlockLayout] = []
    widths: set[int] = set()
    for index, (group, spec) in enumerate(zip(kv_config.kv_cache_groups, groups, strict=True)):
        runs = [_page_run(name, caches[name], kv_config.num_blocks) for name in group.layer_names if name in caches]
        local_heads = heads.last - heads.first + 1
        widths |= {run.nbytes // (spec.block_size * local_heads) for run in runs}
        target = sorted((r for r in runs if r.layer < num_layers), key=lambda r: (r.layer, r.name))
        drafts = sorted((r for r in runs if r.layer >= num_layers), key=lambda r: (r.layer, r.name))
        for span in (target, drafts):
            if span:
                layouts.append(_layout(index, span, heads))
    tensors = list(caches.values())
    inputs = NamespaceInputs(
        model=model_identity(vllm_config, cache_namespace),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{tensors[0].dtype}",
        page_format=_page_format(vllm_config, caches),
        token_head_bytes=tuple(sorted(widths)),
        groups=tuple(map(str, groups)),
        num_layers=num_layers,
        hash_block_size=kv_config.hash_block_size or 0,
    )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return WorkerLayout(tuple(layouts), inputs, tuple(storages.items()), tensors[0].device.type, _private_reason(vllm_config))


def _heads(vllm_config: VllmConfig) -> HeadSpan:
    model, tp = vllm_config.model_config, get_tp_group()
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    return head_span(total, tp.world_size, tp.rank_in_group)


def _layout(group: int, span: list[PageRun], heads: HeadSpan) -> BlockLayout:
    layers = tuple(sorted({run.layer for run in span}))
    shard = Shard(heads.first, heads.last, layers)
    return BlockLayout(group, shard, tuple(span), heads.replica, heads.replicas)


def _page_run(name: str, tensor: torch.Tensor, num_blocks: int) -> PageRun:
    try:
        stride, nbytes = page_geometry(tuple(tensor.shape), tensor.stride(), tensor.element_size(), num_blocks)
    except ValueError as error:
        raise ValueError(f"the KV cache of layer {name} cannot be pooled: {error}") from None
    return PageRun(extract_layer_index(name), name, tensor.data_ptr(), stride, nbytes)


def _page_format(vllm_config: VllmConfig, caches: Mapping[str, torch.Tensor]) -> str:
    """Attention backend, instruction set where the packing depends on it, and the axis order inside a page."""
    layers = vllm_config.compilation_config.static_forward_context
    parts = set()
    for name, tensor in caches.items():
        layer = layers.get(name)
        backend = layer.get_attn_backend().get_name() if layer is not None and hasattr(layer, "get_attn_backend") else "?"
        order = sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))
        parts.add(f"{backend}/{getattr(layer, 'isa', '')}/{''.join(map(str, order))}")
    return ",".join(sorted(parts))


def _private_reason(vllm_config: VllmConfig) -> str:
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "FP8 scales are computed at run time"
    return ""


def rank_name() -> int:
    """A number that tells the ranks of one engine apart: pipeline stage x tensor-parallel size + rank."""
    tp = get_tp_group()
    return get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group
