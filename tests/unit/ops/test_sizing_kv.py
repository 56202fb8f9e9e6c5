"""KV bytes from config.json: kinds of attention, how ranks share heads and layers, and what is refused instead of guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine import models
from tests.unit.ops.sizing_models import DEEPSEEK_V32, QWEN3_32B, sized

from kvpool.core.shards import head_span
from kvpool.ops.sizing.kv_cache import engine_block_bytes, groups, kv_bytes
from kvpool.ops.sizing.layers import LayerKind, layer_kinds
from kvpool.ops.sizing.model import CLASS_DEFAULTS, model_shape
from kvpool.ops.sizing.model_file import text_settings
from kvpool.ops.sizing.plan import Plan
from kvpool.options import OptionError

ONE = {"tokens": 1, "concurrency": 1}
TINY_DSA = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 4,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "index_topk": 64,
    "index_head_dim": 64,
}
GEMMA3_TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}


def block_bytes(model: dict[str, Any], **plan: Any) -> int:
    chosen = Plan(**ONE, **plan)
    return engine_block_bytes(kv_bytes(model_shape(model), chosen), chosen.block_size)


@pytest.mark.parametrize(
    ("model", "plan", "nbytes"),
    [
        (models.QWEN3, {"block_size": 128, "kv_dtype": "bfloat16"}, 4 * 131072),
        (models.MLA, {"block_size": 16, "kv_dtype": "bfloat16"}, 4 * 18432),
        (models.GEMMA3, {"block_size": 128, "kv_dtype": "bfloat16"}, 65536),
        (models.MOE, {"block_size": 128, "kv_dtype": "bfloat16"}, 2 * 65536),
        (TINY_DSA, {"block_size": 64, "kv_dtype": "float32", "indexer_dtype": "float32"}, 229376),
    ],
    ids=["gqa", "mla", "sliding", "half-sliding", "dsa"],
)
def test_bytes_that_engines_have_allocated(model, plan, nbytes):
    """Measured once on vLLM 0.32 for CPUs with tiny models; tests/engine/test_sizing.py measures three of them each time."""
    assert block_bytes(model, **plan) == nbytes


def test_real_models():
    assert sized(QWEN3_32B).value("kv_bytes_per_token") == 2 * 8 * 128 * 2 * 64 == 262144
    assert sized(DEEPSEEK_V32).value("kv_bytes_per_token") == 61 * (576 * 2 + 132)
    assert sized(DEEPSEEK_V32, kv_dtype="fp8_ds_mla").value("kv_bytes_per_token") == 61 * (656 + 132)
    assert sized(DEEPSEEK_V32, indexer_dtype="bfloat16").value("kv_bytes_per_token") == 61 * (1152 + 256)


@pytest.mark.parametrize(
    ("kv_dtype", "factor"), [("auto", 2), ("bfloat16", 2), ("float16", 2), ("float32", 4), ("fp8", 1), ("fp8_e5m2", 1)]
)
def test_data_types(kv_dtype, factor):
    assert sized(QWEN3_32B, kv_dtype=kv_dtype).value("kv_bytes_per_token") == 131072 * factor


@given(heads=st.sampled_from([1, 2, 4, 8]), tp=st.sampled_from([1, 2, 4, 8, 16]), layers=st.integers(1, 70), pp=st.integers(1, 8))
def test_what_ranks_hold_adds_up_to_the_pool(heads, tp, layers, pp):
    """Over ranks that hold a head first, the bytes per token of all stages are those in the pool: no head twice, none left out."""
    model = {**QWEN3_32B, "num_key_value_heads": heads, "num_hidden_layers": layers}
    if pp > layers:
        with pytest.raises(OptionError, match="--pp"):
            kv_bytes(model_shape(model), Plan(**ONE, tp=tp, pp=pp))
        return
    kv = kv_bytes(model_shape(model), Plan(**ONE, tp=tp, pp=pp))
    firsts = [rank for rank in range(tp) if head_span(heads, tp, rank).replica == 0]
    stages = [sum(map(kv.layer, stage)) for stage in kv.stages]
    assert len(firsts) * sum(stages) == kv.per_token_pool == layers * heads * 512
    assert kv.per_token_rank == max(stages)


def test_a_latent_cache_is_on_every_rank_and_once_in_the_pool():
    one, many = sized(DEEPSEEK_V32), sized(DEEPSEEK_V32, tp=8)
    for name in ("kv_bytes_per_token", "kv_bytes_per_token_rank", "engine_bytes_per_block"):
        assert one.value(name) == many.value(name)


@given(full=st.integers(0, 40), sliding=st.integers(0, 40))
def test_groups_hold_every_layer_once_and_are_alike(full, sliding):
    if full + sliding == 0:
        return
    types = ["full_attention"] * full + ["sliding_attention"] * sliding
    shape = model_shape({**GEMMA3_TEXT, "num_hidden_layers": full + sliding, "layer_types": types})
    made = groups(shape)
    assert sorted(layer for group in made for layer in group) == list(range(full + sliding))
    assert all(len({shape.layers[layer] for layer in group}) == 1 for group in made)


def test_twelve_sliding_and_thirteen_full_layers_make_two_groups():
    types = ["sliding_attention"] * 12 + ["full_attention"] * 13
    shape = model_shape({**GEMMA3_TEXT, "num_hidden_layers": 25, "layer_types": types})
    assert sorted(map(len, groups(shape))) == [12, 13]


def test_text_models_inside_others_and_what_their_classes_know():
    """google/gemma-3-4b-it leaves out heads and layer types."""
    shape = model_shape(
        {"model_type": "gemma3", "architectures": ["X"], "text_config": GEMMA3_TEXT, "vision_config": {"num_hidden_layers": 27}}
    )
    assert (shape.kv_heads, shape.width, shape.window) == (4, 512, 1024)
    assert [i for i, kind in enumerate(shape.layers) if kind is LayerKind.FULL] == [5, 11, 17, 23, 29]
    assert text_settings({"thinker_config": {"text_config": {"a": 1}}}) == {"a": 1}


@pytest.mark.parametrize("model_type", sorted(CLASS_DEFAULTS))
def test_class_defaults_are_those_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    if model_type == "gemma3":  # a class around gemma3_text
        assert CLASS_DEFAULTS["gemma3"] == CLASS_DEFAULTS["gemma3_text"]
        return
    config = transformers.AutoConfig.for_model(model_type)
    assert {name: getattr(config, name) for name in CLASS_DEFAULTS[model_type]} == CLASS_DEFAULTS[model_type]


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "sliding", [{}, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 7}], ids=["", "on"]
)
def test_implied_layer_types_are_those_of_transformers(model_type, sliding):
    """What a file without layer_types means."""
    transformers = pytest.importorskip("transformers")
    if sliding and not model_type.startswith("qwen"):
        sliding = {"sliding_window": 512}
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=14, **sliding)
    names = getattr(config, "layer_types", None) or ["sliding_attention" if config.sliding_window else "full_attention"] * 14
    expected = [LayerKind.SLIDING if name == "sliding_attention" else LayerKind.FULL for name in names]
    raw = {"model_type": model_type, "num_hidden_layers": 14, "sliding_window": 4096, **sliding}
    assert list(layer_kinds(raw)) == expected


@pytest.mark.parametrize(
    ("settings", "with_indexer"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"index_topk_freq": 2}, [0, 1, 3, 5]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2]),
        ({"index_topk_pattern": "FSSFSS"}, [0, 3]),
    ],
)
def test_layers_that_share_the_choice_of_another_have_no_indexer(settings, with_indexer):
    shape = model_shape({**TINY_DSA, "num_hidden_layers": 6, **settings})
    assert [i for i, has in enumerate(shape.indexers) if has] == with_indexer


def test_layers_that_read_the_kv_of_others_have_none():
    assert len(model_shape({**QWEN3_32B, "num_kv_shared_layers": 10}).layers) == 54


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "64"}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 64}, "linear_attention"),
        ({"linear_attn_config": {"a": 1}}, "linear_attn_config"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"compress_ratios": [4]}, "compress_ratios"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "model_type"),
        ({"model_type": "falcon"}, "model_type"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "--kv-dtype"),
    ],
)
def test_what_is_not_known_is_refused_and_named(change, named):
    with pytest.raises(OptionError) as refused:
        sized({**QWEN3_32B, **change})
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("plan", "named"),
    [({"tp": 3}, "--tp"), ({"pp": 65}, "--pp"), ({"kv_dtype": "fp8_ds_mla"}, "--kv-dtype")],
)
def test_parallelism_and_data_types_that_do_not_fit(plan, named):
    with pytest.raises(OptionError) as refused:
        sized(QWEN3_32B, **plan)
    assert refused.value.key == named


def test_independent_layers_exist():
    with pytest.raises(OptionError, match="0 to 60"):
        sized(DEEPSEEK_V32, layerwise_buffers=2, layerwise_independent=(61,))


@given(tokens=st.integers(1, 10000), concurrency=st.integers(1, 50), block=st.sampled_from([16, 128]), ranks=st.integers(1, 64))
def test_the_pool_holds_the_workload_and_is_not_a_gib_a_rank_too_large(tokens, concurrency, block, ranks):
    report = sized(QWEN3_32B, tokens=tokens, concurrency=concurrency, block_size=block, ranks=ranks)
    total, each = report.value("kv_bytes_total"), report.value("dram_per_rank")
    assert total >= tokens * concurrency * 262144
    assert total % (block * 262144) == 0
    assert each % (1 << 30) == 0
    assert (each - (1 << 30)) * ranks < total <= each * ranks
