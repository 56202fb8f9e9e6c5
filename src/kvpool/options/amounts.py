"""Amounts that both the rules of start-up and `kvpool size` compute: one formula each. Sizes are bytes, GB are powers of 1024."""

from __future__ import annotations

GIB = 1 << 30
HUGE_PAGE = 2 << 20
MIN_UBSIO_GB, MAX_UBSIO_GB = 5, 3072


def whole_gib(nbytes: int) -> int:
    """GiB, rounded up."""
    return -(-nbytes // GIB)


def huge_pages(nbytes: int) -> int:
    """Huge pages of 2 MiB that hold ``nbytes``."""
    return -(-nbytes // HUGE_PAGE)


def most_ubsio_gb(available: int, services: int) -> int:
    """The most memory in GB that UBS IO may take in each of ``services`` local services with memory on one node."""
    return min(MAX_UBSIO_GB, available // GIB // services)


def fabric_nbytes(segment: int, offload_buffer: int) -> int:
    """Fabric memory of one rank; ``offload_buffer`` is 0 without a disk tier."""
    return segment + offload_buffer


def mooncake_host_nbytes(ranks: int, segment: int, offload_buffer: int, local_buffer: int) -> int:
    """Memory of one host that its ranks take for Mooncake."""
    return ranks * (segment + offload_buffer + local_buffer)
