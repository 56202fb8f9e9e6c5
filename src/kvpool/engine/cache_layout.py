"""From a worker's KV-cache tensors to block layouts and to what shapes their bytes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.model_executor.models.utils import extract_layer_index

from kvpool.core.keys import Shard
from kvpool.core.layout import BlockLayout, PageRun, page_geometry
from kvpool.core.namespace import NamespaceInputs
from kvpool.core.shards import HeadSpan, head_span
from kvpool.core.split import Split, split_layout
from kvpool.engine.fingerprint import weights_digest
from kvpool.engine.groups import pool_groups
from kvpool.engine.identity import local_folder, model_identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

DRAFT_PREFIXES = ("draft_model.", "mtp.", "eagle.", "draft.")


@dataclass(frozen=True)
class WorkerLayout:
    """All that a worker knows of its KV memory. ``regions`` are (address, nbytes) of the distinct allocations."""

    layouts: tuple[BlockLayout, ...]
    inputs: NamespaceInputs
    regions: tuple[tuple[int, int], ...]
    device: str
    sharing: str  # why this KV must not be shared with other engines; empty when it may


def describe_caches(
    vllm_config: VllmConfig,
    kv_config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    cache_namespace: str | None,
    split: Split | None = None,
) -> WorkerLayout:
    """ValueError in one line where the caches cannot be pooled. ``split``: stored as a side with other sizes stores."""
    groups = pool_groups(kv_config)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    heads, shard_note = _heads(vllm_config)
    identity = model_identity(vllm_config, cache_namespace)
    layouts: list[BlockLayout] = []
    widths: set[int] = set()
    for index, (group, spec) in enumerate(zip(kv_config.kv_cache_groups, groups, strict=True)):
        runs = [_page_run(name, caches[name], kv_config.num_blocks, num_layers) for name in group.layer_names if name in caches]
        local_heads = heads.last - heads.first + 1
        widths |= {run.nbytes // (spec.block_size * local_heads) for run in runs}
        target = sorted((r for r in runs if r.layer < num_layers), key=lambda r: (r.layer, r.name))
        drafts = sorted((r for r in runs if r.layer >= num_layers), key=lambda r: (r.layer, r.name))
        if target:
            layouts.append(_layout(index, target, heads, shard_note))
        if drafts:
            # How a drafter shards its heads is its own affair: every rank counts as holding heads of its own.
            layouts.append(_layout(index, drafts, *_draft_heads(vllm_config)))
    if split is not None:
        total, ordered = _total_heads(vllm_config), [n for n, t in caches.items() if is_head_major(t, kv_config.num_blocks)]
        layouts = [part for one in layouts for part in split_layout(one, split, total, ordered)]
        _tell_uncut(layouts, split, total)
    tensors = list(caches.values())
    inputs = NamespaceInputs(
        model=identity.text,
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{tensors[0].dtype}",
        page_format=_page_format(vllm_config, caches, kv_config.num_blocks),
        token_head_bytes=tuple(sorted(widths)),
        groups=tuple(map(str, groups)),
        num_layers=num_layers,
        hash_block_size=kv_config.hash_block_size or 0,
        extra=_extra(vllm_config),
    )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return WorkerLayout(tuple(layouts), inputs, tuple(storages.items()), tensors[0].device.type, identity.private)


def _tell_uncut(layouts: Sequence[BlockLayout], split: Split, total_heads: int) -> None:
    """What stays wider than a rank of prefill is never found there."""
    widest = max((one.shard.last_head - one.shard.first_head + 1 for one in layouts), default=0)
    if widest > max(1, total_heads // split.tp_size):
        logger.warning(
            "kvpool: what this engine stores cannot be cut for prefill_tp_size=%d (%d KV heads, %d in one piece): "
            "prefill will not find it",
            split.tp_size,
            total_heads,
            widest,
        )


def _heads(vllm_config: VllmConfig) -> tuple[HeadSpan, str]:
    """The KV heads of this rank, and a note for the shard's name where only the rank tells which they are."""
    model, tp = vllm_config.model_config, get_tp_group()
    total = _total_heads(vllm_config)
    if tp.world_size > 1 and not model.use_mla and _varied_heads(model.hf_text_config, total):
        # Which ranks hold the same heads differs by layer: every rank counts as holding heads of its own.
        return HeadSpan(tp.rank_in_group, tp.rank_in_group, 0, 1), f"t{tp.world_size}"
    return head_span(total, tp.world_size, tp.rank_in_group), ""


def _total_heads(vllm_config: VllmConfig) -> int:
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def is_head_major(cache: torch.Tensor, num_blocks: int) -> bool:
    """Whether a page is its heads, one after another: vLLM's logical axes are block, head, token, content."""
    if cache.dim() != 4 or cache.shape[0] != num_blocks:
        return False
    others = [cache.stride(axis) for axis in (2, 3) if cache.shape[axis] > 1]
    return all(cache.stride(1) > stride for stride in others)


def _draft_heads(vllm_config: VllmConfig) -> tuple[HeadSpan, str]:
    tp, speculative = get_tp_group(), vllm_config.speculative_config
    drafter = getattr(speculative, "draft_model_config", None)
    name = str(drafter.model) if drafter is not None else ""
    folder = local_folder(name, None, None) if name else None
    known = (weights_digest(folder) if folder is not None else None) or hashlib.sha256(name.encode()).hexdigest()
    return HeadSpan(tp.rank_in_group, tp.rank_in_group, 0, 1), f"t{tp.world_size}d{known[:8]}"


def _varied_heads(hf_config: object, total: int) -> bool:
    """Whether some layers have another number of KV heads than the model's general one (MiMo-V2's sliding layers, for one)."""
    general = ("num_key_value_heads", "num_kv_heads")
    names = [n for n in vars(hf_config) if n.endswith(general) and n not in general]
    return any(getattr(hf_config, name) not in (None, total) for name in names)


def _layout(group: int, span: list[PageRun], heads: HeadSpan, note: str) -> BlockLayout:
    layers = tuple(sorted({run.layer for run in span}))
    shard = Shard(heads.first, heads.last, layers, note=note)
    return BlockLayout(group, shard, tuple(span), heads.replica, heads.replicas)


def _page_run(name: str, tensor: torch.Tensor, num_blocks: int, num_layers: int) -> PageRun:
    try:
        stride, nbytes = page_geometry(tuple(tensor.shape), tensor.stride(), tensor.element_size(), num_blocks)
    except ValueError as error:
        raise ValueError(f"the KV cache of layer {name} cannot be pooled: {error}") from None
    layer = extract_layer_index(name)
    if layer < num_layers and name.startswith(DRAFT_PREFIXES):
        layer += num_layers  # a drafter that counts its layers from 0
    return PageRun(layer, name, tensor.data_ptr(), stride, nbytes)


def _extra(vllm_config: VllmConfig) -> dict[str, str]:
    """What else shapes the bytes in some models."""
    extra: dict[str, str] = {}
    model = vllm_config.model_config
    scaling = getattr(model.hf_text_config, "rope_parameters", None) or getattr(model.hf_text_config, "rope_scaling", None)
    if "longrope" in str(scaling):
        original = getattr(model.hf_text_config, "original_max_position_embeddings", None) or 0
        extra["long_rope"] = str(model.max_model_len > int(original))
    if skipped := getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None):
        extra["kv_cache_dtype_skip_layers"] = str(sorted(map(str, skipped)))
    return extra


def _page_format(vllm_config: VllmConfig, caches: Mapping[str, torch.Tensor], num_blocks: int) -> str:
    """Per kind of tensor: attention backend, instruction set (CPU), axis order in a page, element type, kernel blocks a page."""
    layers = vllm_config.compilation_config.static_forward_context
    parts = set()
    for name, tensor in caches.items():
        layer = layers.get(name)
        backend = layer.get_attn_backend().get_name() if layer is not None and hasattr(layer, "get_attn_backend") else "?"
        strides = tensor.stride()
        order = "".join(map(str, sorted(range(1, tensor.dim()), key=lambda axis: -strides[axis])))
        parts.add(f"{backend}/{getattr(layer, 'isa', '')}/{order}/{tensor.dtype}/{tensor.shape[0] // num_blocks}")
    return ",".join(sorted(parts))


def rank_name() -> int:
    """A number that tells the ranks of one engine apart: pipeline stage x tensor-parallel size + rank."""
    tp = get_tp_group()
    return get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group


def global_rank(vllm_config: VllmConfig) -> int:
    """A number that also tells the data-parallel engines of one configuration apart."""
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + rank_name())


def local_rank() -> int:
    """The number of this worker's device on its host."""
    return int(get_world_group().local_rank)
