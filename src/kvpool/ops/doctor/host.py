"""The host that is examined, as readers see it: files below a root, variables, tools. Nothing here changes anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvpool.options.probe import Probe

TOOL_S = 10.0
MAX_TEXT = 1 << 20
T = TypeVar("T")


class Ran(NamedTuple):
    """How a tool ended: its exit status (None: it was stopped after its deadline) and what it printed."""

    code: int | None
    output: str


Runner = Callable[[Sequence[str]], Ran | None]
"""Runs a tool; None where there is no such program."""


def run_tool(command: Sequence[str], timeout_s: float = TOOL_S) -> Ran | None:
    """Run a tool that only shows something; it and its children are killed after the deadline."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Ran(1, str(error.strerror))
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return Ran(process.returncode, output.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        _kill(process)
    except BaseException:  # Ctrl-C reaches us only: the tool has a session of its own
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        raise
    output = b""
    with suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=2)
    return Ran(None, output.decode(errors="replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of ``call``; None where it takes longer (its thread is left behind) or raises OSError."""
    results: list[T] = []

    def work() -> None:
        with suppress(OSError):
            results.append(call())

    thread = threading.Thread(target=work, daemon=True, name="doctor")
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


@dataclass(frozen=True)
class Host:
    """Tests give it a folder as ``root`` and tools of their own."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    run: Runner = run_tool
    version_of: Callable[[str], str | None] = installed_version

    def place(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """The first megabyte of a file; None where it cannot be read."""
        with suppress(OSError), self.place(path).open("rb") as file:
            return file.read(MAX_TEXT).decode(errors="replace")
        return None

    def number(self, path: str) -> int | None:
        """A file that holds one integer."""
        with suppress(ValueError, TypeError):
            return int(self.text(path) or "")
        return None

    def names(self, path: str) -> list[str] | None:
        """The sorted names in a folder; None where it cannot be listed."""
        with suppress(OSError):
            return sorted(os.listdir(self.place(path)))
        return None

    def exists(self, path: str) -> bool:
        with suppress(OSError):
            return self.place(path).exists()
        return False

    def probe(self) -> Probe:
        """The same host for the rules of options."""
        return Probe(str(self.root))
