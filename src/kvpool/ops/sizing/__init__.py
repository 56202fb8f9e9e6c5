"""`kvpool size`: how much memory and disk a deployment needs, from a model's config.json and a few numbers. Pure arithmetic."""

from __future__ import annotations

from typing import Any

from kvpool.ops.sizing.disk_tiers import mooncake_section, ubsio_section, yuanrong_section
from kvpool.ops.sizing.figures import Report
from kvpool.ops.sizing.host import host_section
from kvpool.ops.sizing.kv_cache import kv_bytes, kv_section
from kvpool.ops.sizing.model import model_shape
from kvpool.ops.sizing.offloading import layerwise_section, sparse_section
from kvpool.ops.sizing.plan import Plan
from kvpool.ops.sizing.pool import pool_section


def size(settings: dict[str, Any], plan: Plan) -> Report:
    """Every figure that follows from a model's config.json and ``plan``. OptionError for what cannot be sized."""
    plan.check()
    shape = model_shape(settings)
    kv = kv_bytes(shape, plan)
    sections = [
        kv_section(shape, kv, plan),
        pool_section(kv, plan),
        host_section(kv, plan),
        mooncake_section(kv, plan),
        ubsio_section(plan),
        yuanrong_section(kv, plan),
        layerwise_section(kv, plan),
        sparse_section(kv, plan),
    ]
    return Report([section for section in sections if section is not None])
