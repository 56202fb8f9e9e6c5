"""The control channel: one listener per prefill engine, questions and answers of at most a few megabytes.

A message is three frames: head (protocol and a nonce), body (msgpack) and the HMAC of both. The answer carries the nonce of its
question, so neither can be replayed in place of another. Without a secret (off loopback, and said so at start) the HMAC proves
nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from kvpool.core.signing import sign, verify
from kvpool.transfer.messages import PROTOCOL, Refused, Reply, Request

logger = logging.getLogger(__name__)

MAX_QUESTION = 1 << 20
MAX_ANSWER = 64 << 20
_NONCE = 16
_MAGIC = b"kvpool-transfer-%d:" % PROTOCOL
_POLL_MS = 100
_LINGER_MS = 200
_CLOSE_S = 1.0
_ENDED = "this side has ended"


class ChannelError(Exception):
    """No usable answer: the reason in one line."""


def endpoint(host: str, port: int) -> str:
    """As ZeroMQ and operators write it; IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _numeric(host: str) -> str:
    """ZeroMQ binds to numbers and interfaces, not to names. OSError for a name that nobody knows."""
    return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, max_bytes: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    made.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    made.setsockopt(zmq.IPV6, int(":" in host))
    return made


class Responder:
    """Answers questions in a thread of its own until ``close``. OSError where the port cannot be had."""

    def __init__(self, host: str, port: int, secret: bytes, answer: Callable[[Request], Reply]) -> None:
        self._secret = secret
        self._answer = answer
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER, host, MAX_QUESTION)
        try:
            self._socket.bind(endpoint(_numeric(host), port))
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(0)
            self._context.term()
            raise OSError(f"cannot listen on {endpoint(host, port)}: {os.strerror(error.errno or 0)}") from None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvpool-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent; returns within a second or so."""
        self._stop.set()
        self._thread.join(2.0)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(_POLL_MS):
                    self._serve(self._socket.recv_multipart())
            except Exception:
                logger.exception("kvpool: a message of a decode engine could not be answered")
                self._stop.wait(0.01)
        self._socket.close(_LINGER_MS)
        self._context.term()

    def _serve(self, frames: list[bytes]) -> None:
        if len(frames) != 4:
            return
        peer, head, body, tag = frames
        nonce = head[-_NONCE:]
        reply = self._encoder.encode(self._reply(head, body, tag))
        head = _MAGIC + nonce
        self._socket.send_multipart([peer, head, reply, sign(self._secret, head + reply)])

    def _reply(self, head: bytes, body: bytes, tag: bytes) -> Reply:
        if not head.startswith(_MAGIC) or len(head) != len(_MAGIC) + _NONCE:
            return Refused(f"the prefill side speaks protocol {PROTOCOL}, not that of the message: run one version of kvpool")
        if not verify(self._secret, head + body, tag):
            return Refused("the signature is wrong: set the same KVPOOL_SECRET on prefill and decode")
        try:
            request = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            return Refused(f"the message makes no sense: {error}")
        try:
            return self._answer(request)
        except Exception as error:
            logger.exception("kvpool: a question of a decode engine could not be answered")
            return Refused(f"internal error of the prefill side: {type(error).__name__}")


class Line:
    """One connection of one thread to a responder. A context manager; ``ask`` never waits beyond the given time."""

    def __init__(self, caller: Caller, made: zmq.Socket[bytes], where: str, secret: bytes) -> None:
        self._caller = caller
        self._where = where
        self._secret = secret
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._socket = made

    def __enter__(self) -> Line:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close(_LINGER_MS)
        self._caller.left()

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """ChannelError where no answer has come in time, or none that can be trusted."""
        end = time.monotonic() + timeout_s
        nonce = secrets.token_bytes(_NONCE)
        head, body = _MAGIC + nonce, msgspec.msgpack.encode(request)
        if self._caller.closed:
            raise ChannelError(f"{self._where}: {_ENDED}")
        self._socket.send_multipart([head, body, sign(self._secret, head + body)], zmq.NOBLOCK)
        while (left := end - time.monotonic()) > 0:
            if not self._socket.poll(max(1, min(_POLL_MS, int(left * 1000)))):
                if self._caller.closed:
                    raise ChannelError(f"{self._where}: {_ENDED}")
                continue
            frames = self._socket.recv_multipart()
            if len(frames) == 3 and frames[0][-_NONCE:] == nonce:
                return self._open(frames)
        raise ChannelError(f"{self._where}: no answer in {timeout_s:.1f} s")

    def _open(self, frames: list[bytes]) -> Reply:
        head, body, tag = frames
        if not head.startswith(_MAGIC):
            raise ChannelError(f"{self._where}: speaks another protocol than {PROTOCOL}: run one version of kvpool")
        if not verify(self._secret, head + body, tag):
            raise ChannelError(f"{self._where}: the signature of the answer is wrong: set the same KVPOOL_SECRET on both sides")
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelError(f"{self._where}: the answer makes no sense: {error}") from None


class Caller:
    """Makes lines to responders; one per process and secret. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._state = threading.Condition()
        self._lines = 0
        self.closed = False

    def line(self, host: str, port: int) -> Line:
        """To be entered. ChannelError where the address is none, or after ``close``."""
        where = endpoint(host, port)
        with self._state:
            if self.closed:
                raise ChannelError(f"{where}: {_ENDED}")
            made = _socket(self._context, zmq.DEALER, host, MAX_ANSWER)
            try:
                made.connect(where)
            except zmq.ZMQError as error:
                made.close(0)
                raise ChannelError(f"{where}: {error.strerror}") from None
            self._lines += 1
        return Line(self, made, where, self._secret)

    def left(self) -> None:
        """A line has ended."""
        with self._state:
            self._lines -= 1
            self._state.notify_all()

    def close(self) -> None:
        """Questions under way end with an error within moments. Idempotent.

        A socket belongs to its thread: where one is still at something else, the sockets stay until the process ends.
        """
        with self._state:
            self.closed = True
            free = self._state.wait_for(lambda: not self._lines, _CLOSE_S)
        if free:
            self._context.destroy(linger=0)
