"""Settings of models as their config.json has them, as far as they shape the KV cache."""

from __future__ import annotations

from typing import Any

from kvpool.ops.sizing import size
from kvpool.ops.sizing.figures import Report
from kvpool.ops.sizing.plan import Plan

GIB = 1 << 30
QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
}
DEEPSEEK_V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}


def sized(model: dict[str, Any], **plan: Any) -> Report:
    """The report for a plan of one sequence of 4,096 tokens in small steps, unless ``plan`` says otherwise."""
    return size(model, Plan(**{"tokens": 4096, "concurrency": 1, "max_batched_tokens": 128, **plan}))


def problems(report: Report) -> list[str]:
    """The options that have a problem."""
    return [finding.key for finding in report.findings if finding.problem]


def warnings(report: Report) -> list[str]:
    return [finding.key for finding in report.findings if not finding.problem]


def fix(report: Report, key: str) -> str:
    return next(finding.fix for finding in report.findings if finding.key == key)
