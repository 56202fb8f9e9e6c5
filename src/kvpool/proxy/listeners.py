"""Sockets to listen on, bound before anything else starts, so that a port that is taken is told in one line."""

from __future__ import annotations

import errno
import socket

from kvpool.options.errors import OptionError

BACKLOG = 2048


def bind(host: str, port: int, flag: str) -> list[socket.socket]:
    """One socket for each address of the host; port 0: any, the same for all. OptionError, naming ``flag``, where that fails."""
    try:
        found = socket.getaddrinfo(None if host in ("", "*") else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OptionError(flag, host, f"cannot be resolved: {error.strerror}") from None
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port_of(bound) if bound else port, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue  # "localhost" may name an address family that this host does not have
            close(bound)
            text = f"cannot be listened on: {error.strerror}; choose another with {flag}"
            raise OptionError(flag, f"{host}:{port}", text) from None
        bound.append(listener)
    if not bound:
        raise OptionError(flag, f"{host}:{port}", "is no address of this host")
    return bound


def port_of(listeners: list[socket.socket]) -> int:
    return int(listeners[0].getsockname()[1])


def close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
