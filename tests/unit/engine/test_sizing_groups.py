"""How `kvpool size` puts layers into groups, against vLLM's own code, without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.ops.sizing.kv_cache import engine_block_bytes, groups, kv_bytes
from kvpool.ops.sizing.layers import LayerKind
from kvpool.ops.sizing.model import model_shape
from kvpool.ops.sizing.plan import Plan

pytest.importorskip("vllm")
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

MODEL = {"model_type": "gemma3_text", "sliding_window": 512, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 64}
NAMES = {LayerKind.FULL: "full_attention", LayerKind.SLIDING: "sliding_attention"}


@settings(max_examples=200)
@given(kinds=st.lists(st.sampled_from(sorted(NAMES, key=str)), min_size=2, max_size=70).filter(lambda kinds: len(set(kinds)) == 2))
def test_groups_are_those_of_vllm(kinds):
    shape = model_shape({**MODEL, "num_hidden_layers": len(kinds), "layer_types": [NAMES[kind] for kind in kinds]})
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, sliding = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=512)
    theirs = _get_kv_cache_groups_uniform_page_size(
        {str(index): full if kind is LayerKind.FULL else sliding for index, kind in enumerate(kinds)}
    )
    assert sorted(groups(shape)) == sorted(tuple(map(int, group.layer_names)) for group in theirs)
    kv = kv_bytes(shape, Plan(tokens=1, concurrency=1, block_size=16))
    widest = max(len(group.layer_names) for group in theirs)
    assert engine_block_bytes(kv, 16) == widest * full.page_size_bytes


@pytest.mark.parametrize(("kv_dtype", "packed"), [("auto", None), ("fp8_ds_mla", 656)])
def test_latent_pages_are_those_of_vllm(kv_dtype, packed):
    """DeepSeek-V3.2: its latent rows, and the indexer's keys in fp8 with a scale for each 128."""
    model = {"model_type": "deepseek_v32", "num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = model_shape({**model, "index_topk": 2048, "index_head_dim": 128})
    kv = kv_bytes(shape, Plan(tokens=1, concurrency=1, block_size=64, kv_dtype=kv_dtype))
    common = {"block_size": 64, "num_kv_heads": 1}
    main = MLAAttentionSpec(**common, head_size=576, dtype=torch.bfloat16, state_content_bytes=packed)
    indexer = MLAAttentionSpec(**common, head_size=128 + 128 // 128 * 4, dtype=torch.uint8)
    assert engine_block_bytes(kv, 64) == main.page_size_bytes + indexer.page_size_bytes
