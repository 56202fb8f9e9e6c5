"""Huge pages against need, on the host and on each NUMA node; free runs where NPUs map memory by large pages.

Every fix is a command for an operator to judge: nothing of it is run."""

from __future__ import annotations

from kvpool.ops.doctor.facts.free_runs import FreeRuns
from kvpool.ops.doctor.facts.huge_pages import NODES, HugePages
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need, memory_amounts, page_needs
from kvpool.options.amounts import GIB, HUGE_PAGE, huge_pages, whole_gib

AREA = "huge pages"
WHO = "a Yuanrong worker with huge pages, remote H2D, memcache over host_tcp; mooncake and memcache on NPUs over RoCE"
TOTAL = Check(AREA, "reserved", "huge pages of 2 MiB are reserved", WHO)
FREE = Check(AREA, "free", "as many of them are free", WHO)
NODE = Check(AREA, "numa nodes", "every NUMA node has its share of them free", WHO)
RUNS = Check(AREA, "free runs", "free runs of 1 GiB and 2 MiB suffice for the pool", "mooncake and memcache on series a2, a3, a5")
CHECKS = (TOTAL, FREE, NODE, RUNS)
COMPACT = "echo 3 > /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/compact_memory (as root, when no engine runs)"


def judge_huge_pages(facts: HugePages, runs: FreeRuns, need: Need) -> list[Finding]:
    wanted = page_needs(need)
    count = sum(pages.number for pages in wanted)
    found = _pages(facts, count, must=any(pages.must for pages in wanted), why=", ".join(pages.what for pages in wanted))
    return found + ([_runs(runs, need)] if need.contiguous else [])


def _pages(facts: HugePages, count: int, *, must: bool, why: str) -> list[Finding]:
    if not count:
        return []
    needed = f"{count} of 2 MiB ({why})"
    others = max(0, facts.total - facts.free) if facts.total is not None and facts.free is not None else 0
    fix = f"echo {count + others} > /proc/sys/vm/nr_hugepages (as root, early after boot; the pool takes {_in_gib(count)}"
    fix += f", others hold {_in_gib(others)})" if others else ")"
    if facts.total is None:
        return [TOTAL.unknown("the kernel shows none", needed, "look at HugePages_Total in /proc/meminfo")]
    judge = TOTAL.failure if must else TOTAL.warning
    if facts.total < count:
        return [judge(f"{facts.total} reserved", needed, fix)]
    found = [TOTAL.ok(f"{facts.total} reserved", needed)]
    if facts.free is None:
        return [*found, FREE.unknown("not shown", needed, "look at HugePages_Free in /proc/meminfo")]
    if facts.free < count:
        more = f"stop what holds them (it may be this pool, running), or reserve more: echo {count + facts.total - facts.free}"
        judge = FREE.failure if must else FREE.warning
        return [*found, judge(f"{facts.free} of {facts.total} free", needed, f"{more} > /proc/sys/vm/nr_hugepages")]
    found.append(FREE.ok(f"{facts.free} of {facts.total} free", needed))
    return found + _nodes(facts, count)


def _in_gib(pages: int) -> str:
    return f"{pages * HUGE_PAGE / GIB:.1f} GiB"


def _nodes(facts: HugePages, count: int) -> list[Finding]:
    """Memory far from its NPU is slow, and a worker that is bound to a node finds none on another."""
    if len(facts.nodes) < 2:
        return []
    shown = ", ".join(f"node{pages.node} {pages.free} of {pages.total}" for pages in facts.nodes)
    share = -(-count // len(facts.nodes))
    short = [pages for pages in facts.nodes if pages.free < share]
    if short:
        path = f"{NODES}/node{short[0].node}/hugepages/hugepages-2048kB/nr_hugepages"
        fix = f"echo {short[0].total + share - short[0].free} > {path} (as root), and so for each node that is short"
        return [NODE.warning(f"free: {shown}", f"about {share} on each", fix)]
    return [NODE.ok(f"free: {shown}", f"about {share} on each")]


def _runs(runs: FreeRuns, need: Need) -> Finding:
    """Fewer free runs than needed may still do: the kernel can move pages. It is a warning, never a failure."""
    nbytes = sum(amount.nbytes for amount in memory_amounts(need))
    large, small = whole_gib(nbytes), huge_pages(nbytes)
    needed = f"{large} of 1 GiB, and in all {small} of 2 MiB" if nbytes else "runs of 1 GiB and 2 MiB"
    if runs.small is None:
        return RUNS.unknown("free runs are not shown", needed, "run doctor as root on the host, which can read /proc/kpageflags")
    longest = f", the longest {runs.longest / GIB:.2f} GiB" if runs.longest is not None else ""
    of_large = f"{runs.large} of 1 GiB" if runs.large is not None else "those of 1 GiB are not shown (root sees them)"
    shown = f"{runs.small} free runs of 2 MiB, {of_large}{longest}"
    enough = runs.small >= max(small, 1) and (runs.large is None or runs.large >= max(large, 1))
    if runs.partial:
        shown = f"at least {shown}"
    if enough:
        return RUNS.ok(shown, needed)
    if runs.partial:
        return RUNS.unknown(f"{shown}; there was no time for all memory", needed, f"if the pool then lacks memory: {COMPACT}")
    return RUNS.warning(shown, needed, COMPACT)
