"""Tiny random-weight models, made once and cached: real engines need real weights, and these start in seconds.

The weights have enough spread (std 0.08, embeddings 1.0) that greedy outputs vary; with the usual small initial weights every
output repeats one token, and no test of exactness could fail. There is no tokenizer: prompts are token ids in [0, VOCAB).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 1024
HIDDEN = 256
INTER = 512
MAX_LEN = 16384
_FORMAT = 1

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        **more,
    }


QWEN3 = _common(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)

MLA = _common(
    model_type="deepseek_v2",
    architectures=["DeepseekV2ForCausalLM"],
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=4,
    moe_layer_freq=1,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
)

GEMMA3 = _common(
    model_type="gemma3_text",
    architectures=["Gemma3ForCausalLM"],
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    query_pre_attn_scalar=64,
    sliding_window=256,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    hidden_activation="gelu_pytorch_tanh",
)

MOE = _common(
    model_type="gpt_oss",
    architectures=["GptOssForCausalLM"],
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_local_experts=4,
    num_experts_per_tok=2,
    attention_bias=True,
    rope_theta=150000.0,
)


def _gqa(config: dict[str, Any], prefix: str) -> Shapes:
    width, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    rows = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
    for name, out in rows.items():
        yield f"{prefix}.{name}.weight", (out, HIDDEN)
        if config["attention_bias"]:
            yield f"{prefix}.{name}.bias", (out,)
    yield f"{prefix}.o_proj.weight", (HIDDEN, heads * width)
    if config["attention_bias"]:
        yield f"{prefix}.o_proj.bias", (HIDDEN,)


def _dense_mlp(config: dict[str, Any], prefix: str) -> Shapes:
    for name in ("gate_proj", "up_proj"):
        yield f"{prefix}.{name}.weight", (config["intermediate_size"], HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, config["intermediate_size"])


def _qwen3_layer(config: dict[str, Any], layer: str) -> Shapes:
    yield from _gqa(config, f"{layer}.self_attn")
    yield f"{layer}.self_attn.q_norm.weight", (config["head_dim"],)
    yield f"{layer}.self_attn.k_norm.weight", (config["head_dim"],)
    yield from _dense_mlp(config, f"{layer}.mlp")
    yield f"{layer}.input_layernorm.weight", (HIDDEN,)
    yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)


def _gemma3_layer(config: dict[str, Any], layer: str) -> Shapes:
    yield from _qwen3_layer(config, layer)
    yield f"{layer}.pre_feedforward_layernorm.weight", (HIDDEN,)
    yield f"{layer}.post_feedforward_layernorm.weight", (HIDDEN,)


def _mla_layer(config: dict[str, Any], layer: str) -> Shapes:
    attn, heads, rank = f"{layer}.self_attn", config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{attn}.q_proj.weight", (heads * (nope + rope), HIDDEN)
    yield f"{attn}.kv_a_proj_with_mqa.weight", (rank + rope, HIDDEN)
    yield f"{attn}.kv_a_layernorm.weight", (rank,)
    yield f"{attn}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{attn}.o_proj.weight", (HIDDEN, heads * value)
    yield from _dense_mlp(config, f"{layer}.mlp")
    yield f"{layer}.input_layernorm.weight", (HIDDEN,)
    yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)


def _moe_layer(config: dict[str, Any], layer: str) -> Shapes:
    experts, inter = config["num_local_experts"], config["intermediate_size"]
    yield from _gqa(config, f"{layer}.self_attn")
    yield f"{layer}.self_attn.sinks", (config["num_attention_heads"],)
    yield f"{layer}.mlp.router.weight", (experts, HIDDEN)
    yield f"{layer}.mlp.router.bias", (experts,)
    yield f"{layer}.mlp.experts.gate_up_proj", (experts, HIDDEN, 2 * inter)
    yield f"{layer}.mlp.experts.gate_up_proj_bias", (experts, 2 * inter)
    yield f"{layer}.mlp.experts.down_proj", (experts, inter, HIDDEN)
    yield f"{layer}.mlp.experts.down_proj_bias", (experts, HIDDEN)
    yield f"{layer}.input_layernorm.weight", (HIDDEN,)
    yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)


_MODELS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any], str], Shapes]]] = {
    "qwen3": (QWEN3, _qwen3_layer),
    "mla": (MLA, _mla_layer),
    "gemma3": (GEMMA3, _gemma3_layer),
    "moe": (MOE, _moe_layer),
}
NAMES = tuple(_MODELS)


def cache_root() -> Path:
    """The per-user folder for everything tests and the demo make once and keep."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvpool"


def model_path(name: str, seed: int = 0) -> Path:
    """Folder of the tiny model `name`, made on first use. Another `seed` gives the same shapes with other weights."""
    config, layer_shapes = _MODELS[name]
    version = hashlib.sha256(json.dumps([_FORMAT, seed, config], sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_root() / "models" / f"{name}-{version}"
    if not folder.exists():
        _publish(folder, config, _tensors(config, layer_shapes, seed))
    return folder


def _tensors(config: dict[str, Any], layer_shapes: Callable[[dict[str, Any], str], Shapes], seed: int) -> dict[str, np.ndarray]:
    shapes = dict(_all_shapes(config, layer_shapes))
    rng = np.random.default_rng(seed)
    norm = 0.0 if config["model_type"].startswith("gemma") else 1.0  # Gemma's norms scale by (1 + weight)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = np.full(shape, norm, np.float32)
            continue
        std = 1.0 if "embed_tokens" in name else 0.08 if len(shape) > 1 else 0.02
        tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(std)
    return tensors


def _all_shapes(config: dict[str, Any], layer_shapes: Callable[[dict[str, Any], str], Shapes]) -> Shapes:
    """Every tensor of the checkpoint: (name, shape), in the order in which the weights are drawn."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(config["num_hidden_layers"]):
        yield from layer_shapes(config, f"model.layers.{i}")
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _publish(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write beside the target and rename: a killed or a concurrent maker never leaves half a model."""
    from safetensors.numpy import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    (scratch / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.chmod(0o755)
    try:
        scratch.rename(folder)
    except OSError:  # another process was first
        for leftover in scratch.iterdir():
            leftover.unlink()
        scratch.rmdir()
        if not folder.exists():
            raise


# What an engine must be told to run these exactly in float32 on any x86 CPU. vLLM would take the AMX MLA kernels (bfloat16 only)
# where the CPU has AMX, and its own rotary kernel is wrong for MLA's 3-D queries: the PyTorch one is right.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "mla": {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
}
