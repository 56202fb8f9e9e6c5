"""The shape of a model's KV cache, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.ops.sizing.layers import LayerKind, indexer_layers, layer_kinds
from kvpool.ops.sizing.model_file import text_settings, whole
from kvpool.options import OptionError

MLA_TYPES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "pangu_ultra_moe",
)
"""Models whose latent cache vLLM 0.32 stores as such."""
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "cohere2": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
}
"""What files of these models leave out because their classes know it."""
UNKNOWN_SHAPES = ("compress_ratios", "block_configs", "attn_config", "encoder_layers", "kv_lora_rank_per_layer")
UNKNOWN_TYPES = ("falcon", "gpt_bigcode", "dbrx", "mpt", "minicpm3", "chatglm")
HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")
HEAD_DIMS = ("head_dim", "index_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``width``: elements per token and KV head, K and V together; of a latent cache ``kv_lora_rank + qk_rope_head_dim``.

    ``kv_heads`` of the whole model, 1 for a latent cache. ``indexers``: per layer, is there an indexer's key cache?
    ``max_tokens``: of a sequence; 0 where config.json does not say.
    """

    model_type: str
    layers: tuple[LayerKind, ...]
    kv_heads: int
    width: int
    mla: bool
    window: int
    index_topk: int
    index_head_dim: int
    indexers: tuple[bool, ...]
    quantized_kv: bool
    max_tokens: int

    @property
    def attention(self) -> str:
        """The usual name of it."""
        if self.index_topk:
            return "DSA"
        if self.mla:
            return "MLA"
        return "GQA" if LayerKind.FULL in self.layers and len(set(self.layers)) == 1 else "sliding window"


def model_shape(settings: dict[str, Any]) -> ModelShape:
    """OptionError where config.json lacks something, or describes a cache that this does not know: never a guess."""
    text = text_settings(settings)
    model_type = str(text.get("model_type", settings.get("model_type", "")))
    text = {key: value for key, value in {**CLASS_DEFAULTS.get(model_type, {}), **text}.items() if value is not None}
    _refuse_unknown(settings, text, model_type)
    layers = layer_kinds(text)
    mla = text.get("kv_lora_rank") is not None
    if mla and model_type not in MLA_TYPES:
        raise OptionError(
            "model_type", model_type, "has kv_lora_rank, but is not known as a model with a latent cache", where="config.json"
        )
    if mla:
        heads, width = 1, whole(text, "kv_lora_rank") + whole(text, "qk_rope_head_dim")
    else:
        attention_heads = whole(text, "num_attention_heads", "n_head", "n_heads")
        heads = whole(text, *HEADS, default=attention_heads)
        head_dim = (
            whole(text, "head_dim", "hidden_size_per_head", default=0) or whole(text, "hidden_size", "n_embd") // attention_heads
        )
        width = 2 * head_dim
        _refuse_varied(text, heads, head_dim)
    index_topk = whole(text, "index_topk") if mla and text.get("index_topk") else 0
    return ModelShape(
        model_type,
        layers,
        heads,
        width,
        mla,
        whole(text, "sliding_window") if LayerKind.SLIDING in layers else 0,
        index_topk,
        whole(text, "index_head_dim") if index_topk else 0,
        indexer_layers(text, len(layers)) if index_topk else (False,) * len(layers),
        _names_kv_scheme(text),
        _max_tokens(text, model_type),
    )


def _refuse_unknown(settings: Mapping[str, Any], text: Mapping[str, Any], model_type: str) -> None:
    if settings.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise OptionError("is_encoder_decoder", True, "caches of cross attention cannot be sized", where="config.json")
    if model_type in UNKNOWN_TYPES:
        raise OptionError("model_type", model_type, "its KV cache is not known here", where="config.json")
    for name in UNKNOWN_SHAPES:
        if text.get(name):
            raise OptionError(name, text[name], "a KV cache of this kind is not known here", where="config.json")


def _refuse_varied(text: Mapping[str, Any], heads: int, head_dim: int) -> None:
    """Models in which some layers have other heads than the general ones (names as global_head_dim, swa_num_key_value_heads)."""
    for name, value in text.items():
        varied = (name.endswith("num_key_value_heads") and name not in HEADS and value != heads) or (
            name.endswith("head_dim") and name not in HEAD_DIMS and value != head_dim
        )
        if varied or (name == "v_head_dim" and value != head_dim):
            raise OptionError(name, value, "some heads differ from the others, which cannot be sized", where="config.json")


def _max_tokens(text: Mapping[str, Any], model_type: str) -> int:
    """As vLLM 0.32 derives max_model_len: linear and dynamic scaling, but for Gemma 3, come on top of max_position_embeddings."""
    most = text.get("max_position_embeddings") or text.get("n_positions")
    scaling = text.get("rope_parameters") or text.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) and "gemma3" not in model_type else {}
    factor = scaling.get("factor") if scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic") else None
    if not isinstance(most, int):
        return 0
    return int(most * factor) if isinstance(factor, int | float) else most


def _names_kv_scheme(text: Mapping[str, Any]) -> bool:
    """Whether the checkpoint itself says that its KV cache is quantized."""
    quantization = text.get("quantization_config")
    return isinstance(quantization, Mapping) and bool(
        quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    )
