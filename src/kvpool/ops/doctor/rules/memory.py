"""Memory: what the pool takes against what the host, /dev/shm and the control group have."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.ops.doctor.facts.memory import Memory
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Amount, Need, memory_amounts, shared_memory_amounts
from kvpool.ops.doctor.rules.huge_pages import COMPACT
from kvpool.options.amounts import GIB, whole_gib

AREA = "memory"
AVAILABLE = Check(AREA, "available", "available memory suffices for pool and buffers of all ranks", "where the sizes are known")
CACHE = Check(AREA, "page cache", "the page cache does not hold what NPUs must map", "mooncake and memcache on series a2, a3, a5")
SHARED = Check(AREA, "/dev/shm", "/dev/shm has room for what lies in it", "local, host_shm, transfers within one host")
LIMIT = Check(
    AREA, "control group", "the memory limit of the control group (of the container) suffices", "where the sizes are known"
)
LOCKED = Check(AREA, "locked memory", "memory can be locked without limit", "rdma and host_rdma; series a2, a3, a5")
CHECKS = (AVAILABLE, CACHE, SHARED, LIMIT, LOCKED)


def gib(nbytes: int) -> str:
    """A size in words."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"


def judge_memory(facts: Memory, need: Need) -> list[Finding]:
    amounts, shared = memory_amounts(need), shared_memory_amounts(need)
    found = [*_available(facts, amounts), *_shared(facts, shared), *_limit(facts, amounts)]
    if need.contiguous:
        found.append(_cache(facts, amounts))
    if need.npu or need.protocol in ("rdma", "host_rdma"):
        found.append(_locked(facts))
    return found


def _told(amounts: Sequence[Amount]) -> tuple[int, str]:
    """The sum, and the sum with its parts in words."""
    total = sum(amount.nbytes for amount in amounts)
    parts = " + ".join(f"{amount.what} {gib(amount.nbytes)}" for amount in amounts)
    return total, gib(total) + (f" ({parts})" if len(amounts) > 1 else f" ({amounts[0].what})" if amounts else "")


def _available(facts: Memory, amounts: Sequence[Amount]) -> list[Finding]:
    if not amounts:
        return []
    total, needed = _told(amounts)
    if facts.available is None:
        return [AVAILABLE.unknown("not shown", needed, "compare with the memory that this host has free")]
    room = facts.available + facts.pool
    if total > room:
        return [AVAILABLE.failure(f"{gib(room)} available", needed, "lower these sizes, or stop what takes the memory")]
    return [AVAILABLE.ok(f"{gib(room)} available", needed)]


def _shared(facts: Memory, amounts: Sequence[Amount]) -> list[Finding]:
    if not amounts:
        return []
    total, needed = _told(amounts)
    if facts.shm_total is None or facts.shm_free is None:
        return [
            SHARED.failure("/dev/shm is not there", needed, "mount a tmpfs there, or set local_pool_root to a folder of this host")
        ]
    room = facts.shm_free + facts.pool
    if total <= room:
        return [SHARED.ok(f"{gib(room)} free of {gib(facts.shm_total)}", needed)]
    size = whole_gib(total + facts.shm_total - room)
    fix = f"mount -o remount,size={size}G /dev/shm; for a container --shm-size={size}g or --ipc=host"
    return [SHARED.failure(f"{gib(room)} free of {gib(facts.shm_total)}", needed, fix)]


def _limit(facts: Memory, amounts: Sequence[Amount]) -> list[Finding]:
    if not amounts:
        return []
    total, needed = _told(amounts)
    if facts.limit is None:
        look = "look at memory.max of the container, or at what its --memory or resources.limits.memory says"
        return [LIMIT.ok("no limit", needed) if facts.groups else LIMIT.unknown("not shown", needed, look)]
    if total > facts.limit:
        fix = "raise the limit (--memory, resources.limits.memory): the kernel kills who exceeds it; pages of the pool count too"
        return [LIMIT.failure(f"{gib(facts.limit)} allowed", needed, fix)]
    return [LIMIT.ok(f"{gib(facts.limit)} allowed", needed)]


def _cache(facts: Memory, amounts: Sequence[Amount]) -> Finding:
    if facts.total is None or facts.cached is None or facts.free is None:
        return CACHE.unknown("not shown", "less than half of the memory", "look at Cached in /proc/meminfo")
    total = sum(amount.nbytes for amount in amounts)
    shown = f"{gib(facts.cached)} cached, {gib(facts.free)} free"
    if facts.cached > facts.total // 2 or (total > facts.free and facts.cached > total - facts.free):
        return CACHE.warning(shown, f"{gib(total)} free at once" if total else "less than half of the memory", COMPACT)
    return CACHE.ok(shown)


def _locked(facts: Memory) -> Finding:
    if facts.locked is None:
        return LOCKED.unknown("not shown", "unlimited", "look at `ulimit -l`")
    if facts.locked >= 0:
        return LOCKED.warning(gib(facts.locked), "unlimited", "ulimit -l unlimited; for a container --ulimit memlock=-1")
    return LOCKED.ok("unlimited")
