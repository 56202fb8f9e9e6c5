"""The kv-transfer-config of each mode, as the deployment guides have it; for launches and for production files alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvpool.options.connectors import MULTI, POOL, PULL

Role = Literal["kv_producer", "kv_consumer"]
POLICY = "recompute"
"""vLLM's default, ``fail``, ends a request whose blocks cannot be loaded."""


def alone(pool: Mapping[str, Any]) -> dict[str, Any]:
    """One engine that computes prompts and answers; ``pool`` has the options of its store."""
    return {
        "kv_connector": POOL,
        "kv_role": "kv_both",
        "kv_load_failure_policy": POLICY,
        "kv_connector_extra_config": dict(pool),
    }


def paired(role: Role, kv_port: int, tp: int, pool: Mapping[str, Any], pull: Mapping[str, Any]) -> dict[str, Any]:
    """One side of a pair. Decode stores what it generates, so that prefill finds it in the next turn. The policy stands at the top,
    where alone it has an effect."""
    sizes = {"dp_size": 1, "tp_size": tp}
    puts = {"consumer_is_to_put": True} if role == "kv_consumer" else {}
    children = [
        {
            "kv_connector": PULL,
            "kv_role": role,
            "kv_port": str(kv_port),
            "kv_connector_extra_config": {"prefill": sizes, "decode": sizes, **pull},
        },
        {"kv_connector": POOL, "kv_role": role, "kv_connector_extra_config": {**pool, **puts}},
    ]
    return {
        "kv_connector": MULTI,
        "kv_role": role,
        "kv_load_failure_policy": POLICY,
        "kv_connector_extra_config": {"connectors": children},
    }
