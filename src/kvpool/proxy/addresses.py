"""Host names and ports of engines and listeners, IPv6 included."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from kvpool.options.errors import OptionError
from kvpool.options.scalars import split_address

_DIGITS = re.compile(r"[0-9.]+", re.ASCII)
_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)


class Address(NamedTuple):
    """``host`` without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}"


def read_host(key: str, value: str) -> str:
    """A name, an IPv4 or an IPv6 address, with or without brackets. OptionError for anything else, as two addresses in one word."""
    text = value.strip()
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in host or "[" in text:
        if _ip(host) is None:
            raise OptionError(key, value, "is no IPv6 address (a port goes into the option for ports)")
    elif _DIGITS.fullmatch(host):
        if _ip(host) is None:
            raise OptionError(key, value, "is no IPv4 address; several are written with blanks between them")
    elif not _NAME.fullmatch(host):
        raise OptionError(key, value, "is no host name, IPv4 address or IPv6 address")
    return host


def read_address(key: str, value: object) -> Address:
    """ "host:port" or "[v6]:port"; OptionError otherwise."""
    try:
        host, port = split_address(value if isinstance(value, str) else "")
    except ValueError:
        raise OptionError(key, value, 'accepted: "<host>:<port>", an IPv6 host in brackets') from None
    return Address(read_host(key, host), port)


def pair(hosts_key: str, hosts: list[str], ports_key: str, ports: list[int]) -> list[Address]:
    """Hosts and ports, one by one; the first of equal ones stays. OptionError where there are more of one than of the other."""
    if len(hosts) != len(ports):
        raise OptionError(
            ports_key, ports, f"{len(ports)} ports for {len(hosts)} hosts in {hosts_key}; there must be one port for each host"
        )
    return list(dict.fromkeys(Address(read_host(hosts_key, host), port) for host, port in zip(hosts, ports, strict=True)))


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of the host, in any spelling that binds so ("0.0.0.0", "::", "0", "")."""
    ip = _ip(host)
    if ip is not None:
        return ip.is_unspecified
    try:
        return host in ("", "*") or not any(socket.inet_aton(host))
    except OSError:
        return False


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip
