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
    try:
        return ipaddress.ip_address(host_of(address)).is_unspecified
    except ValueError:
        return host_of(address) in ("", "*")


def only_here(address: str) -> bool:
    """True where other hosts cannot reach the address: loopback and wildcard."""
    try:
        return is_wildcard(address) or ipaddress.ip_address(host_of(address)).is_loopback
    except ValueError:
        return host_of(address) == "localhost"


def check_reachable(key: str, address: str, deployment: Deployment, where: str) -> None:
    """OptionError where several hosts share a pool whose address only one of them reaches."""
    if (deployment.hosts or 1) > 1 and only_here(address):
        reason = (
            f"is reached from one host only, but {deployment.hosts} hosts share the pool: give an address that all of them reach"
        )
        raise OptionError(key, address, reason, where=where)
