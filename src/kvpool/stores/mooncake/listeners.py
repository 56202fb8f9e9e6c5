"""Which ports this process listens on beyond loopback: a library opens some of its own, on all interfaces."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def open_listeners() -> set[str]:
    """``address:port`` of every TCP listener of this process that is not on loopback; empty where /proc does not tell."""
    mine = _socket_inodes()
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in mine and not _loopback(address := _address(fields[1], family)):
                    found.add(address)
    return found


def _socket_inodes() -> set[str]:
    inodes = set()
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _address(text: str, family: socket.AddressFamily) -> str:
    """From the kernel's form: words of 32 bits in the order of this machine, then the port, in hexadecimal."""
    host, port = text.split(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    name = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return f"[{name}]:{int(port, 16)}" if family == socket.AF_INET6 else f"{name}:{int(port, 16)}"


def _loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]:", "[::ffff:127."))
