"""Disk tiers of Mooncake and MemCache, fabric memory, and the huge pages of openYuanrong."""

from __future__ import annotations

from kvpool.ops.sizing.figures import GUIDE, OWN, Section
from kvpool.ops.sizing.kv_cache import KvBytes, engine_block_bytes
from kvpool.ops.sizing.plan import Plan
from kvpool.ops.sizing.pool import dram_size, pool_size
from kvpool.options.amounts import GIB, MIN_UBSIO_GB, fabric_nbytes, huge_pages, most_ubsio_gb, whole_gib
from kvpool.options.mooncake_ssd import BUFFER, DEFAULTS, LIMIT, READERS, USABLE, least_buffer

FABRIC_HEADROOM_GB = 1
UBSIO_SEPARATED_GB, UBSIO_GB = 50, 10


def offload_buffer(kv: KvBytes, plan: Plan) -> int:
    """Bytes of a rank's staging buffer of Mooncake's disk tier: as planned, else the least in GiB; 0 without that tier."""
    if plan.disk_size is None and plan.offload_buffer is None:
        return 0
    return whole_gib(_least(kv, plan)) * GIB if plan.offload_buffer is None else plan.offload_buffer


def _least(kv: KvBytes, plan: Plan) -> int:
    """Bytes of the buffer without which single objects could not be loaded."""
    return least_buffer(engine_block_bytes(kv, plan.block_size))


def mooncake_section(kv: KvBytes, plan: Plan) -> Section | None:
    """The disk tier and fabric memory of Mooncake; None where neither is planned."""
    planned = plan.disk_size is not None or plan.offload_buffer is not None
    if not plan.may_use("mooncake") or not (planned or plan.fabric or plan.fabric_capacity is not None):
        return None
    section = Section("Mooncake: disk tier and fabric memory")
    buffer = offload_buffer(kv, plan)
    if plan.disk_size is not None:
        ranks, share = plan.givers_per_node, plan.disk_size // plan.givers_per_node
        formula = f"disk of {plan.disk_size} bytes / {ranks} ranks of a node; set {LIMIT} and the bucket quota"
        section.add("ssd_per_rank", share, "bytes", formula, f"{GUIDE}, 2.5.2")
        shown = DEFAULTS[LIMIT] * ranks
        section.add("ssd_shown_by_default", shown, "bytes", f"{ranks} ranks x 2 TB, where {LIMIT} is not set", f"{GUIDE}, 2.5.2")
    if planned:
        _check_buffer(section, kv, plan, buffer)
    if plan.fabric or plan.fabric_capacity is not None:
        _fabric(section, dram_size(kv, plan), buffer, plan)
    return section


def _check_buffer(section: Section, kv: KvBytes, plan: Plan, planned: int) -> None:
    """It must hold what is loaded at one time, and fit into the KV memory of a worker."""
    least = _least(kv, plan)
    need = whole_gib(least) * GIB
    nbytes = engine_block_bytes(kv, plan.block_size)
    formula = f"{READERS} objects of {nbytes} bytes in {USABLE:.0%} of it, up to whole GiB; loads are split to fit"
    section.add("offload_buffer", need, "bytes", formula, OWN)
    if plan.kv_memory is not None:
        formula = 'the "Available KV cache memory" of a worker\'s log'
        section.add("offload_buffer_most", plan.kv_memory, "bytes", formula, f"{GUIDE}, 5.3.2.3")
    if plan.kv_memory is not None and planned > plan.kv_memory:
        text = f"{BUFFER}={planned} is more than the KV memory of a worker ({plan.kv_memory} bytes)"
        section.problem("--offload-buffer", text, f"set at most {plan.kv_memory}")
    if planned < least:
        text = f"{planned} bytes are less than the {least} that loads of single objects need at one time (BUFFER_OVERFLOW)"
        section.problem("--offload-buffer", text, f"set {BUFFER}={need}")
    if plan.fabric and planned % GIB:
        text = f"{planned} is no multiple of 1GB, which fabric memory needs"
        section.problem("--offload-buffer", text, f"set {BUFFER}={whole_gib(planned) * GIB}")


def _fabric(section: Section, segment: int, buffer: int, plan: Plan) -> None:
    least = whole_gib(fabric_nbytes(segment, buffer))
    formula = f"segment {segment} + offload buffer {buffer}, up to whole GiB, + {FABRIC_HEADROOM_GB}"
    section.add("fabric_max_capacity", least + FABRIC_HEADROOM_GB, "GB", formula, f"{GUIDE}, 5.3.2.2")
    if segment % GIB:
        section.problem("--dram-size", f"a segment of {segment} bytes is no multiple of 1GB", f"set {whole_gib(segment)}GB")
    given = plan.fabric_capacity
    if given is not None and given < least:
        text = f"fabric_memory.max_capacity={given} is less than the {least} GB that a rank allocates"
        section.problem("--fabric-capacity", text, f"set {least + FABRIC_HEADROOM_GB}, or lower the segment or the buffer")


def ubsio_section(plan: Plan) -> Section | None:
    """The memory of MemCache's disk tier; None where the memory for it is not given."""
    if plan.ubsio_memory is None or not plan.may_use("memcache"):
        return None
    section = Section("MemCache: disk tier (UBS IO)")
    services, source = plan.givers_per_node, f"{GUIDE}, 3.8.3"
    most = most_ubsio_gb(plan.ubsio_memory, services)
    formula = f"min(3072, floor({plan.ubsio_memory / GIB:g} GB of the node / {services} local services with memory))"
    section.add("ubsio_most", most, "GB", formula, source)
    usual = UBSIO_SEPARATED_GB if plan.separated else UBSIO_GB
    section.add("ubsio_size", min(usual, most), "GB", f"{usual} is recommended here, at most ubsio_most", source)
    section.add("ubsio_device_count", services, "count", "local services of the node whose dram.size is not 0", f"{GUIDE}, 3.3")
    planned = plan.ubsio_size if plan.ubsio_size is not None else min(usual, most)
    section.add("ubsio_total", planned * services, "GB", f"{planned} GB x {services} local services", f"{GUIDE}, 3.3")
    if most < MIN_UBSIO_GB:
        text = f"each local service could take {most} GB, the disk tier needs {MIN_UBSIO_GB}"
        section.problem(
            "--ubsio-memory", text, f"free memory ({MIN_UBSIO_GB * services} GB are needed), or run fewer local services"
        )
    elif planned < MIN_UBSIO_GB:
        section.problem("--ubsio-size", f"{planned} is less than {MIN_UBSIO_GB}", f"set {min(usual, most)}")
    elif planned > most:
        section.problem("--ubsio-size", f"{planned} GB x {services} are more than the node has for it", f"set at most {most}")
    return section


def yuanrong_section(kv: KvBytes, plan: Plan) -> Section | None:
    """Shared memory of a worker and the huge pages that it needs with enable_huge_tlb and remote H2D."""
    if not plan.may_use("yuanrong"):
        return None
    section = Section("openYuanrong")
    need = -(-pool_size(kv, plan) // (plan.nodes << 20))
    section.add(
        "shared_memory_size_mb", need, "MB", f"the pool's bytes / {plan.nodes} nodes (one worker each), up to whole MiB", OWN
    )
    mb = plan.shared_memory_mb or need
    pages = huge_pages(mb << 20)
    section.add("huge_pages", pages, "count", f"{mb} MiB / 2 MiB", f"{GUIDE}, 4.3 and 4.4.2")
    if mb < need:
        section.problem("--shared-memory-mb", f"{mb} MiB hold less than the {need} that the pool needs", f"set {need}")
    if plan.huge_pages is not None and plan.huge_pages < pages:
        text = f"{plan.huge_pages} pages of 2 MiB are reserved, a worker needs {pages}"
        section.problem("--huge-pages", text, f"reserve {pages} before it starts: sysctl vm.nr_hugepages={pages}")
    return section
