"""What a store and its client process say to each other: msgpack behind a length of four bytes, on a socket pair."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Literal, TypedDict, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
GREETING = b"kvpool"
"""What lies at the address that the greeting tells."""
M = TypeVar("M", bound=msgspec.Struct)
Verb = Literal["exists", "create", "publish", "open", "drop", "delete"]


class Settings(msgspec.Struct, frozen=True):
    """How the client process reaches its worker. ``hetero``: by HeteroClient, which sees what NPU processes store."""

    host: str
    port: int
    connect_ms: int
    request_ms: int
    exclusive: bool = False
    hetero: bool = False


class Buffer(msgspec.Struct, array_like=True, frozen=True):
    """Memory of one object: ``address`` in the client process, which keeps it until it is dropped by ``number``."""

    number: int
    address: int
    nbytes: int


class Request(msgspec.Struct, array_like=True):
    """One call. ``until``: time.monotonic() after which it is not worth beginning. A drop has no reply."""

    number: int
    verb: Verb
    until: float
    names: list[str] = []
    nbytes: int = 0
    buffers: list[int] = []
    wait_ms: int = 0


class Fields(TypedDict, total=False):
    """What a request says beside its verb."""

    names: list[str]
    nbytes: int
    buffers: list[int]
    wait_ms: int


class Reply(msgspec.Struct, array_like=True):
    """The answer to the request of this number; number 0 is the greeting, once the worker is reached.

    ``error`` is the library's own text where the call failed. ``buffers`` has None for what is not there; ``names`` are those that
    failed, or of the greeting: what the library lacks."""

    number: int
    error: str = ""
    found: list[bool] = []
    buffers: list[Buffer | None] = []
    names: list[str] = []
    text: str = ""


class Channel:
    """One end. Sending and receiving may be done by one thread each."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, kind: type[M]) -> M | None:
        """The next message; None where the other end is closed. TimeoutError, with nothing lost, where the socket has a timeout
        and no message begins in time."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        body = self._exactly(_LENGTH.unpack(head)[0])
        return None if body is None else msgspec.msgpack.decode(body, type=kind)

    def _exactly(self, count: int) -> bytes | None:
        parts: list[bytes] = []
        while count:
            try:
                part = self._socket.recv(min(count, 1 << 20))
            except TimeoutError:
                if not parts:
                    raise
                continue
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        with suppress(OSError):  # the other end may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
