"""Ports of this host and addresses of others, tried out: a bind, a connect."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.ops.doctor.host import within
from kvpool.ops.doctor.need import Endpoint, Need
from kvpool.options.addresses import host_of, is_wildcard, port_of

CONNECT_S = 2.0
RESOLVE_S = 5.0
MAX_ADDRESSES = 4
Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Tried:
    """One endpoint. ``good``: it answered, its port is free, or it is the own address that it should be; None where nobody could
    tell. ``here``: it is of this host."""

    endpoint: Endpoint
    good: bool | None
    text: str = ""
    here: bool = False


@dataclass(frozen=True, slots=True)
class Ports:
    """``interface_address`` tells whether HCCL_IF_IP belongs to this host; None where it is unset or nobody could tell.
    ``prefill`` is where prefill listens for decode: ``good`` where that is an address of this host; None without such a prefill."""

    free: tuple[Tried, ...] = ()
    services: tuple[Tried, ...] = ()
    peers: tuple[Tried, ...] = ()
    interface_address: bool | None = None
    prefill: Tried | None = None


def read_ports(need: Need) -> Ports:
    """Every try has a deadline; nothing is sent."""
    peers = [Endpoint("peer", address) for address in need.peers]
    address = need.env.get("HCCL_IF_IP", "")
    return Ports(
        tuple(try_bind(endpoint) for endpoint in need.ports),
        _connect_all(need.services),
        _connect_all(peers),
        is_own(address) if address else None,
        None if need.prefill_place is None else try_own(Endpoint(need.prefill_place.source, need.prefill_place.host)),
    )


def _connect_all(endpoints: Sequence[Endpoint]) -> tuple[Tried, ...]:
    return tuple(try_connect(endpoint) for endpoint in endpoints)


def try_bind(endpoint: Endpoint) -> Tried:
    """Can somebody listen on this port of this host?"""
    port = port_of(endpoint.address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            return Tried(endpoint, False if taken else None, error.strerror or str(error), here=True)
    return Tried(endpoint, True, here=True)


def try_connect(endpoint: Endpoint) -> Tried:
    """Does anybody accept a connection at one of the addresses of the name? ``text`` is how long it took, or why not."""
    host, port = host_of(endpoint.address), port_of(endpoint.address)
    if is_wildcard(endpoint.address):
        host = "127.0.0.1"
    resolved = within(RESOLVE_S, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    if not resolved:
        return Tried(endpoint, False, f"the name {host} cannot be resolved")
    here = any(is_own(str(address[0])) for *_, address in resolved)
    text = ""
    for family, kind, protocol, _, address in resolved[:MAX_ADDRESSES]:
        began = time.monotonic()
        text = _refusal(family, kind, protocol, address)
        if not text:
            return Tried(endpoint, True, f"{(time.monotonic() - began) * 1000:.1f} ms", here)
    return Tried(endpoint, False, text, here)


def _refusal(family: int, kind: int, protocol: int, address: Address) -> str:
    """Why nobody accepts a connection at this one address; "" where somebody does."""
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def try_own(endpoint: Endpoint) -> Tried:
    """Is this host, given without a port, this one? A name is the first address that it resolves to, as when one listens on it."""
    host = endpoint.address.strip("[]")
    resolved = within(RESOLVE_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    if not resolved:
        return Tried(endpoint, False, f"the name {host} cannot be resolved")
    address = str(resolved[0][4][0])
    good = is_own(address)
    text = "whether it is of this host cannot be told" if good is None else f"{address} is {'' if good else 'not '}of this host"
    return Tried(endpoint, good, text, here=bool(good))


def is_own(address: str) -> bool | None:
    """True where a numeric address is one of this host; None where that cannot be told."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return False if error.errno == errno.EADDRNOTAVAIL else None
    return True
