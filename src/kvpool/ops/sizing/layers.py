"""Which layers of a model have a KV cache, and of what kind; which of them have an indexer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from kvpool.ops.sizing.model_file import whole
from kvpool.options import OptionError


class LayerKind(enum.Enum):
    """How far a layer looks back."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"


NAMES = {
    "attention": LayerKind.FULL,
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
}
PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Where config.json names no layer types: every n-th layer is a full one, the others slide."""
RECURRENT = (
    "mamba_d_state",
    "ssm_state_size",
    "mamba_num_heads",
    "linear_num_value_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
)


def layer_kinds(settings: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Per layer with a KV cache of its own. OptionError for models whose cache is not one of attention alone."""
    for name in RECURRENT:
        if settings.get(name):
            raise OptionError(
                name, settings[name], "the model has recurrent layers, which kvpool does not pool", where="config.json"
            )
    count = whole(settings, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    types = settings.get("layer_types")
    kinds = _named(types, count) if types is not None else _implied(settings, count)
    return kinds[: count - int(settings.get("num_kv_shared_layers") or 0)]  # the last ones read the KV of earlier ones


def _named(types: object, count: int) -> tuple[LayerKind, ...]:
    if not isinstance(types, list) or len(types) < count:
        raise OptionError("layer_types", types, f"expected a list of {count} names, one per layer", where="config.json")
    for name in types:
        if name not in NAMES:
            accepted = ", ".join(NAMES)
            raise OptionError("layer_types", name, f"layers of this kind cannot be sized (known: {accepted})", where="config.json")
    return tuple(NAMES[name] for name in types[:count])


def _implied(settings: Mapping[str, Any], count: int) -> tuple[LayerKind, ...]:
    if settings.get("attention_chunk_size"):
        reason = "which layers work in chunks is not said: give layer_types with --hf-overrides"
        raise OptionError("attention_chunk_size", settings["attention_chunk_size"], reason, where="config.json")
    period = settings.get("sliding_window_pattern") or PERIODS.get(str(settings.get("model_type")))
    if isinstance(period, int) and period > 1 and settings.get("sliding_window"):
        return tuple(LayerKind.SLIDING if (index + 1) % period else LayerKind.FULL for index in range(count))
    if not settings.get("sliding_window") or settings.get("use_sliding_window") is False:
        return (LayerKind.FULL,) * count
    if "use_sliding_window" in settings:  # the first max_window_layers see everything
        first = whole(settings, "max_window_layers")
        return tuple(LayerKind.SLIDING if index >= first else LayerKind.FULL for index in range(count))
    if str(settings.get("model_type")).startswith("qwen"):  # there the switch is off by default
        return (LayerKind.FULL,) * count
    return (LayerKind.SLIDING,) * count


def indexer_layers(settings: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Per layer: does it have an indexer, with a key cache of its own? Some models let layers share the choice of another one."""
    if not settings.get("index_topk"):
        return (False,) * count
    pattern = settings.get("index_topk_pattern")
    if pattern is not None:
        return tuple(index >= len(pattern) or pattern[index] != "S" for index in range(count))
    every = whole(settings, "index_topk_freq", default=1)
    offset = whole(settings, "index_skip_topk_offset", default=2)
    return tuple(max(index - offset + 1, 0) % every == 0 for index in range(count))
