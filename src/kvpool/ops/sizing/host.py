"""Memory of one host, and its check against what is free."""

from __future__ import annotations

from kvpool.ops.sizing.disk_tiers import offload_buffer
from kvpool.ops.sizing.figures import GUIDE, OWN, Section
from kvpool.ops.sizing.kv_cache import KvBytes
from kvpool.ops.sizing.plan import Plan
from kvpool.ops.sizing.pool import dram_size
from kvpool.options.amounts import mooncake_host_nbytes


def host_section(kv: KvBytes, plan: Plan) -> Section:
    """What the pool takes of one node."""
    section = Section("Memory of a host")
    each, ranks = dram_size(kv, plan), plan.givers_per_node
    section.add("host_memory_pool", each * ranks, "bytes", f"{ranks} processes of a node x {each}", OWN)
    if plan.host_memory is not None and each * ranks > plan.host_memory:
        fix = f"free memory, add nodes, or give at most {plan.host_memory // ranks} bytes each"
        section.problem("--host-memory", f"the pool needs {each * ranks} bytes of a node, {plan.host_memory} are free", fix)
    if plan.may_use("mooncake"):
        _with_buffers(section, kv, plan)
    return section


def _with_buffers(section: Section, kv: KvBytes, plan: Plan) -> None:
    """Mooncake has buffers beside the segment."""
    each, ranks = dram_size(kv, plan), plan.givers_per_node
    offload, local = offload_buffer(kv, plan), 0 if plan.fabric else plan.local_buffer
    total = mooncake_host_nbytes(ranks, each, offload, local)
    formula = f"{ranks} ranks of a node x (segment {each} + offload buffer {offload} + local buffer {local})"
    section.add("host_memory_mooncake", total, "bytes", formula, f"{GUIDE}, 5.3.2.3 (host memory budget)")
    if plan.host_memory is not None and each * ranks <= plan.host_memory < total:
        text = f"with Mooncake's buffers {total} bytes are needed, {plan.host_memory} are free"
        fix = f"give at most {max(0, plan.host_memory // ranks - offload - local)} bytes each, or smaller buffers"
        section.found(plan.backend == "mooncake", "--host-memory", text, fix)
