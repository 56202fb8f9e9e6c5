"""Ports for what is started: free now, and not among those that the system hands out to others a moment later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

from kvpool.ops.services.base import LOOPBACK
from kvpool.options.errors import OptionError

LOWEST, HIGHEST, TRIES = 10_000, 60_000, 64
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def quiet_ports(handed_out: Path = HANDED_OUT) -> Iterator[int]:
    """A few ports in random order, outside the range from which the system takes ports for connections and for port 0, unless
    that has all of them. What is started listens after half a minute: until then nobody else should get its port by chance."""
    try:
        low, high = map(int, handed_out.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    quiet = [port for port in range(LOWEST, HIGHEST) if not low <= port <= high] or range(LOWEST, HIGHEST)
    yield from random.sample(quiet, min(TRIES, len(quiet)))


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Different ports of ``host`` on which nobody listens. OSError where it is no address of this host."""
    found: list[int] = []
    error = OSError("no port is free")
    for port in quiet_ports():
        try:
            with socket.socket() as probe:
                probe.bind((host, port))
        except OSError as failed:
            error = failed
        else:
            found.append(port)
        if len(found) == count:
            return found
    raise error


def check_host(host: str) -> None:
    """OptionError where no service of this host can listen on that address."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        accepted = f"accepted: {LOOPBACK}, or another IPv4 address of this host"
        raise OptionError("--host", host, f"cannot be listened on ({why}); {accepted}") from None


def free_port(host: str = LOOPBACK) -> int:
    """One of them."""
    return free_ports(1, host)[0]
