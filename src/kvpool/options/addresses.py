"""Which addresses other hosts can reach."""

from __future__ import annotations

import ipaddress

from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError


def host_of(address: str) -> str:
    """The host of "host:port", "[v6]:port" or "<scheme>://host:port"."""
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]").lower()


def port_of(address: str) -> int:
    """The port of an address of one of these forms; 0 where it has none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() else 0


def is_wildcard(address: str) -> bool:
    """True for 0.0.0.0 and [::], on which one listens but which nobody can be reached at."""
    return is_unspecified(host_of(address))


def only_here(address: str) -> bool:
    """True where other hosts cannot reach the address: loopback and wildcard."""
    return is_wildcard(address) or is_loopback(host_of(address))


def is_unspecified(host: str) -> bool:
    """True for a host, without a port, that stands for all addresses: 0.0.0.0, also written 0, [::] and *."""
    ip = _ip(host)
    return host == "*" or not host.strip("0.") if ip is None else ip.is_unspecified


def is_loopback(host: str) -> bool:
    """True for a host, without a port, that is reached from this host only."""
    ip = _ip(host)
    return host.lower().rstrip(".") == "localhost" if ip is None else ip.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def check_reachable(key: str, address: str, deployment: Deployment, where: str) -> None:
    """OptionError where several hosts share a pool whose address only one of them reaches."""
    if (deployment.hosts or 1) > 1 and only_here(address):
        reason = (
            f"is reached from one host only, but {deployment.hosts} hosts share the pool: give an address that all of them reach"
        )
        raise OptionError(key, address, reason, where=where)
