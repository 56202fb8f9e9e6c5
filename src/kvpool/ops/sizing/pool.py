"""The pool in memory: what each process gives, how many may join, room for eviction, connections."""

from __future__ import annotations

from fractions import Fraction

from kvpool.ops.sizing.figures import GUIDE, OFFLOAD, OWN, Section
from kvpool.ops.sizing.kv_cache import KvBytes
from kvpool.ops.sizing.plan import Plan
from kvpool.options.amounts import GIB, whole_gib
from kvpool.options.memcache_rules import MAX_DRAM

CONNECTION_BYTES = 4 << 20
WARMUP_PER_DEVICE, WARMUP_TOKENS = 3, 8192


def pool_size(kv: KvBytes, plan: Plan) -> int:
    """Bytes of the whole pool: as wished, else what the workload needs."""
    return plan.blocks * plan.block_size * kv.per_token_pool if plan.pool_size is None else plan.pool_size


def dram_size(kv: KvBytes, plan: Plan) -> int:
    """Bytes that each process gives: as planned, else what the pool needs in whole GiB."""
    return whole_gib(-(-pool_size(kv, plan) // plan.givers)) * GIB if plan.dram_size is None else plan.dram_size


def pool_section(kv: KvBytes, plan: Plan) -> Section:
    """The pool in memory, for every store."""
    section = Section("Memory pool")
    size, who = pool_size(kv, plan), "standalone processes" if plan.separated else "ranks"
    need = whole_gib(-(-size // plan.givers)) * GIB
    each = dram_size(kv, plan)
    of = "kv_bytes_total" if plan.pool_size is None else "--pool-size"
    section.add("dram_per_rank", need, "bytes", f"{of} / {plan.givers} {who}, up to whole GiB", f"{OFFLOAD}, 1 (dram.size)")
    if plan.dies is not None:
        dies = plan.dies * plan.nodes
        per_die = whole_gib(-(-size // dies)) * GIB
        section.add(
            "dram_per_die", per_die, "bytes", f"{of} / {plan.dies} dies x {plan.nodes} nodes, up to whole GiB", f"{GUIDE}, 3.3"
        )
    section.add("pool_capacity", each * plan.givers, "bytes", f"{plan.givers} {who} x {each} bytes", OWN)
    if each * plan.givers < size:
        section.problem(
            "--dram-size", f"{plan.givers} {who} x {each} bytes hold less than {of}", f"give {need // GIB}GB each, or more of them"
        )
    if each > MAX_DRAM:
        section.problem(
            "--dram-size", f"{each // GIB} GiB are more than the 1 TiB that one process can give", "spread it over more processes"
        )
    _world(section, plan)
    if plan.may_use("mooncake"):
        _eviction(section, kv, plan, each * plan.givers)
    _connections(section, plan)
    return section


def _world(section: Section, plan: Plan) -> None:
    count = plan.local_services + plan.spare
    standalone = f" + {plan.givers} standalone" if plan.separated else ""
    ranks = plan.engine_ranks if plan.separated else plan.local_services
    formula = f"{ranks} ranks{standalone} + {plan.spare} to be added later"
    section.add("world_size", count, "count", formula, f"{GUIDE}, 3.3")
    if plan.world_size is not None and plan.world_size < count:
        section.problem("--world-size", f"{plan.world_size} is less than {count} local services", f"set at least {count}")


def _eviction(section: Section, kv: KvBytes, plan: Plan, capacity: int) -> None:
    """Mooncake evicts at the watermark, a share at a time. What finds no room is offered again for 2 s, then dropped."""
    high, ratio = plan.eviction_high_watermark, plan.eviction_ratio
    tokens = min(plan.max_batched_tokens * plan.dp, plan.tokens * plan.concurrency)
    batch = tokens * kv.per_token_pool
    full, kept = Fraction(str(high)), Fraction(str(high)) * (1 - Fraction(str(ratio)))
    before, after = int(capacity * (1 - full)), int(capacity * (1 - kept))
    formula = f"{tokens} tokens that the engines compute in one step x {kv.per_token_pool}"
    section.add("batch_bytes", batch, "bytes", formula, f"{GUIDE}, 5.3.1")
    section.add("eviction_headroom", before, "bytes", f"pool_capacity x (1 - watermark {high})", f"{GUIDE}, 5.3.1")
    formula = f"pool_capacity x (1 - watermark {high} x (1 - eviction_ratio {ratio}))"
    section.add("headroom_after_eviction", after, "bytes", formula, f"{GUIDE}, 5.3.1")
    if batch > after:
        text = f"with Mooncake: one step stores {batch} bytes, an eviction leaves {after} free: puts fail (NO_AVAILABLE_HANDLE)"
        section.found(
            plan.backend == "mooncake", "--eviction-ratio", text, "raise eviction_ratio or the pool, or lower --max-batched-tokens"
        )
    elif batch > before:
        text = f"with Mooncake: one step stores {batch} bytes, but only {before} are surely free before an eviction"
        section.warning("--eviction-high-watermark", text, "lower eviction_high_watermark_ratio, or give more memory")


def _connections(section: Section, plan: Plan) -> None:
    """The full mesh of one-sided connections that NPUs make with buffers on the device."""
    devices = max(plan.engine_ranks, plan.givers)
    formula = f"4 MB x {devices - 1} connections of a device to every other one"
    section.add("connection_bytes_per_device", CONNECTION_BYTES * (devices - 1), "bytes", formula, f"{GUIDE}, 2.4.2")
    formula = f"{WARMUP_PER_DEVICE} x {devices} devices, {WARMUP_TOKENS} tokens each, one token answered (2 x is enough)"
    section.add("warmup_requests", WARMUP_PER_DEVICE * devices, "count", formula, f"{GUIDE}, 2.4.2")
