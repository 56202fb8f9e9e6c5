"""Memory of one host, and its check against what is free."""

from __future__ import annotations

from kvpool.ops.sizing.disk_tiers import offload_buffer
from kvpool.ops.sizing.figures import GUIDE, OWN, Section
from kvpool.ops.sizing.kv_cache import KvBytes
from kvpool.ops.sizing.plan import Plan
from kvpool.ops.sizing.pool import dram_size
from kvpool.options.amounts import GIB, mooncake_host_nbytes


def host_section(kv: KvBytes, plan: Plan) -> Section:
    """What the pool takes of one node."""
    section = Section("Memory of a host")
    each, ranks = dram_size(kv, plan), plan.givers_per_node
    section.add("host_memory_pool", each * ranks, "bytes", f"{ranks} processes of a node x {each}", OWN)
    if plan.host_memory is not None and each * ranks > plan.host_memory:
        fix = _fix(plan.host_memory // ranks, _host_total(kv, plan) if plan.backend == "mooncake" else each * ranks)
        section.problem("--host-memory", f"the pool needs {each * ranks} bytes of a node, {plan.host_memory} are free", fix)
    if plan.may_use("mooncake"):
        _with_buffers(section, kv, plan)
    return section


def _with_buffers(section: Section, kv: KvBytes, plan: Plan) -> None:
    """Mooncake has buffers beside the segment."""
    each, ranks = dram_size(kv, plan), plan.givers_per_node
    offload, local = _buffers(kv, plan)
    total = _host_total(kv, plan)
    formula = f"{ranks} ranks of a node x (segment {each} + offload buffer {offload} + local buffer {local})"
    section.add("host_memory_mooncake", total, "bytes", formula, f"{GUIDE}, 5.3.2.3 (host memory budget)")
    if plan.host_memory is not None and each * ranks <= plan.host_memory < total:
        text = f"with Mooncake's buffers {total} bytes are needed, {plan.host_memory} are free"
        fix = _fix(plan.host_memory // ranks - offload - local, total)
        section.found(plan.backend == "mooncake", "--host-memory", text, fix)


def _buffers(kv: KvBytes, plan: Plan) -> tuple[int, int]:
    """Bytes of a process's offload buffer and local buffer."""
    return offload_buffer(kv, plan), 0 if plan.fabric else plan.local_buffer


def _host_total(kv: KvBytes, plan: Plan) -> int:
    """Bytes of a node with Mooncake."""
    return mooncake_host_nbytes(plan.givers_per_node, dram_size(kv, plan), *_buffers(kv, plan))


def _fix(most: int, least: int) -> str:
    """``most`` bytes are left for each process; ``least`` bytes of a node are enough for all."""
    less = f", or give at most {most} bytes each" if most > 0 else ""
    return f"free memory, or add nodes{less}; the smallest host memory that works as it is: {least} bytes ({least / GIB:.2f} GiB)"
