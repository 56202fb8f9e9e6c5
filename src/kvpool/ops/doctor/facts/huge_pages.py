"""Huge pages: how many are reserved and free, in all and on each NUMA node."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.ops.doctor.host import Host

NODES = "/sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class NodePages:
    """Huge pages of one size on one NUMA node."""

    node: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class HugePages:
    """``total`` and ``free`` of 2 MiB, None where the kernel does not show them; ``gigantic`` are those of 1 GiB."""

    total: int | None = None
    free: int | None = None
    nodes: tuple[NodePages, ...] = ()
    gigantic: int | None = None
    gigantic_free: int | None = None


def read_huge_pages(host: Host) -> HugePages:
    def of_host(size: str, name: str) -> int | None:
        return host.number(f"/sys/kernel/mm/hugepages/hugepages-{size}/{name}")

    total, free = of_host("2048kB", "nr_hugepages"), of_host("2048kB", "free_hugepages")
    if total is None:
        total = host.probe().huge_pages()
    return HugePages(
        total,
        free,
        tuple(pages for number in node_numbers(host) if (pages := _of_node(host, number)) is not None),
        of_host("1048576kB", "nr_hugepages"),
        of_host("1048576kB", "free_hugepages"),
    )


def node_numbers(host: Host) -> list[int]:
    """The NUMA nodes that the kernel shows."""
    names = [name[4:] for name in host.names(NODES) or [] if name.startswith("node")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _of_node(host: Host, node: int) -> NodePages | None:
    folder = f"{NODES}/node{node}/hugepages/hugepages-2048kB"
    total, free = host.number(f"{folder}/nr_hugepages"), host.number(f"{folder}/free_hugepages")
    return None if total is None or free is None else NodePages(node, total, free)
