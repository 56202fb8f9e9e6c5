"""The proxy as a process in front of engines that serve HTTP, and a client that can leave at any time."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.ops.services.ports import free_port
from tests.engine.pairs import SECRET
from tests.engine.runner import Prompt
from tests.waiting import ended_after, eventually

ANSWER_S = 90.0
LOOPBACK = "127.0.0.1"


@contextmanager
def front(prefill: int, decode: int, log: Path, *flags: str, hosts: tuple[str, str] = (LOOPBACK, LOOPBACK)) -> Iterator[Front]:
    """`kvpool proxy`, prefill first, on loopback before engines on these ports of these hosts."""
    port = free_port()
    sides = ["--prefiller-hosts", hosts[0], "--prefiller-ports", str(prefill)]
    sides += ["--decoder-hosts", hosts[1], "--decoder-ports", str(decode)]
    command = [
        sys.executable,
        "-c",
        "from kvpool.cli import app; app()",
        "proxy",
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        *sides,
        *flags,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--health-interval", "0.5"], stdout=out, stderr=out, env={**os.environ, "KVPOOL_SECRET": SECRET}
        )
    with ended_after(process, 40):
        running = Front(port)
        eventually(running.is_ready, f"a proxy that is ready; see {log}", 60.0)
        yield running


@dataclass
class Answered:
    """``status`` 0: the client has left, or the connection broke."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


class Front:
    def __init__(self, port: int) -> None:
        self.port = port

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, prompt: Prompt, max_tokens: int = 12, headers: dict[str, str] | None = None, **more: Any) -> Answered:
        """A whole answer."""
        return self.start(prompt, max_tokens, headers, **more).result()

    def start(self, prompt: Prompt, max_tokens: int = 12, headers: dict[str, str] | None = None, **more: Any) -> Request:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return Request(self.port, {**body, "return_token_ids": True, "stream": True, **more}, headers or {})


class Request:
    """A streamed request under way, read by a thread of its own."""

    def __init__(self, port: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWER_S)
        self._answered = Answered()
        self._began = time.monotonic()
        sent = {"content-type": "application/json", **headers}
        self._connection.request("POST", "/v1/completions", json.dumps(body).encode(), sent)
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """As a client whose connection breaks."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(ANSWER_S)

    def result(self) -> Answered:
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), f"no answer in {ANSWER_S:g} s"
        return self._answered

    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def tokens(self) -> list[int]:
        """So far."""
        return self._answered.tokens

    def _read(self) -> None:
        mine = self._answered
        try:
            answer = self._connection.getresponse()
            mine.status = answer.status
            if answer.status != 200:
                mine.error = answer.read().decode()
            else:
                for line in answer:
                    self._take(line.strip())
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            mine.status, mine.error = 0, repr(error)
        finally:
            mine.seconds = time.monotonic() - self._began
            self._connection.close()

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            self._answered.error = str(chunk["error"])
        for choice in chunk.get("choices", []):
            self._answered.tokens += choice.get("token_ids") or []
