"""Faults on decode's end of the channel to prefill, inside a test's engine, and a record of every message that was sent.

KVPOOL_TEST_CHANNEL names a folder. `plan.json` there says what happens to messages by their kind: ``{"end": {"lose_answers": 1,
"lose_questions": 1, "keep_answers": 1}}``; what is counted happens so often, answers are kept until the plan says otherwise.
`sent.jsonl` gets the frames of each message.
Engines of tests are forks of one process, so what is installed in the first is in all.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvpool.transfer import channel, pull

VARIABLE = "KVPOOL_TEST_CHANNEL"
ANSWER_S = 1.5
KEPT_S = 60.0  # at most: no answer is kept for ever
_lock = threading.Lock()


class ChannelFaults:
    """The test's side: the plan of one engine, and its record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.set({})

    def set(self, plan: dict[str, dict[str, float]]) -> None:
        write_plan(self.folder, plan)

    def sent(self, kind: str | None = None) -> list[list[bytes]]:
        """Frames of the messages that were sent, oldest first."""
        path = self.folder / "sent.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [[bytes.fromhex(frame) for frame in frames] for name, frames in lines if kind in (None, name)]


def write_plan(folder: Path, plan: dict[str, dict[str, float]]) -> None:
    scratch = folder / f"plan.{threading.get_native_id()}"
    scratch.write_text(json.dumps(plan))
    scratch.replace(folder / "plan.json")


def install(folder: Path) -> None:
    """In an engine: every line to a prefill engine that is made from now on. What is lost is missed sooner than usual."""
    pull.ANSWER_S = ANSWER_S
    real = channel._socket

    def faulty(context: Any, kind: int, host: str, max_bytes: int) -> Any:
        made = real(context, kind, host, max_bytes)
        return _FaultySocket(made, folder) if kind == zmq.DEALER else made

    channel._socket = faulty


class _FaultySocket:
    """As far as `Line` uses a socket: one message at a time."""

    def __init__(self, socket: Any, folder: Path) -> None:
        self._socket, self._folder = socket, folder
        self._kind = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        self._kind = msgspec.msgpack.decode(frames[1])["type"]
        with _lock, (self._folder / "sent.jsonl").open("a") as record:
            record.write(json.dumps([self._kind, [frame.hex() for frame in frames]]) + "\n")
        if not self._take("lose_questions"):
            self._socket.send_multipart(frames, flags)

    def recv_multipart(self) -> list[bytes]:
        frames: list[bytes] = self._socket.recv_multipart()
        if self._take("lose_answers"):
            return []
        end = time.monotonic() + KEPT_S
        while self._plan().get(self._kind, {}).get("keep_answers") and time.monotonic() < end:
            time.sleep(0.02)
        return frames

    def _plan(self) -> dict[str, dict[str, float]]:
        plan: dict[str, dict[str, float]] = json.loads((self._folder / "plan.json").read_text())
        return plan

    def _take(self, fault: str) -> bool:
        with _lock:
            plan = self._plan()
            left = plan.get(self._kind, {}).get(fault, 0)
            if left > 0:
                plan[self._kind][fault] = left - 1
                write_plan(self._folder, plan)
            return left > 0
