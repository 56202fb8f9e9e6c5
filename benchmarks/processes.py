"""Servers that a benchmark needs beside its engines: each in a process group of its own that ends with the block."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpool.ops.services.base import LOOPBACK
from kvpool.ops.services.processes import listens

READY_S, END_S = 60.0, 5.0


@contextmanager
def server(command: Sequence[str], env: Mapping[str, str], port: int | None = None, says: str | None = None) -> Iterator[None]:
    """A process that runs until the end of the block: ready once it listens on a loopback `port`, or once its output has `says`.

    RuntimeError with the end of its output when it ends early or is not ready within a minute.
    """
    with tempfile.NamedTemporaryFile(prefix="kvpool-bench-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True
        )
        try:
            _until_ready(process, Path(log.name), port, says)
            yield
        finally:
            _end(process)


def _until_ready(process: subprocess.Popen[bytes], log: Path, port: int | None, says: str | None) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        if (port is None or listens(LOOPBACK, port)) and (says is None or says in log.read_text(errors="replace")):
            return
        time.sleep(0.1)
    tail = " ".join(log.read_text(errors="replace").splitlines()[-5:])
    raise RuntimeError(f"{process.args!r} did not start: {tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
