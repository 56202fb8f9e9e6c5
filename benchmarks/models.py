"""The models that are measured: a small real one, and one with little to compute and much KV."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.settings import cache_folder

BLOCK = 128  # tokens
TAIL = 8  # tokens at the end of every prompt that no cache can hold


@dataclass(frozen=True)
class Model:
    """`token_bytes`: KV of one token in all layers; `page_bytes`: KV of one block in one layer."""

    name: str
    folder: Path
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * 4

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * BLOCK // self.layers


def smollm() -> Model:
    from kvpool.ops.demo.smollm import model_folder

    return Model("smollm2", model_folder(), layers=30, kv_heads=3, head_dim=64, vocab=49152)


KV_HEAVY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def kv_heavy() -> Model:
    """Random weights, made by vLLM at start: only the time it takes matters."""
    folder = cache_folder() / "kv-heavy-1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(KV_HEAVY, indent=1))
    return Model("kvheavy", folder, layers=28, kv_heads=8, head_dim=128, vocab=1024, args={"load_format": "dummy"})
