"""Engines forked from one process that has imported vLLM: importing it takes seconds, and an engine is three processes or more.

    python -m tests.engine.forked SOCKET

Each connection carries one request, ``{"args": ARGS_FILE, "env": {...}}`` with the descriptors for stdin, output and replies, and
gets back the pid of the engine's frontend, which leads a session of its own. vLLM's processes are forked where it would start them
anew; apart from that everything is as ever. Ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

IMPORTS = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.registry",
    "kvpool.engine.connector",
)
USERS_OF_CONTEXT = (
    "vllm.utils.system_utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.multiproc_executor",
)
# What Python, the loader and libraries read before main(): an engine with its own of these starts anew.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "KMP_", "GOMP_", "HF_", "TORCH")
START_S = 180.0


def can_fork(env: dict[str, str], prefix: list[str]) -> bool:
    """Whether an engine with these variables of its own, and this command before it, may be a fork."""
    return not prefix and not any(name.startswith(READ_AT_START) for name in env)


class Frontend:
    """A forked frontend, as far as ``subprocess.Popen`` is used here. Its exit code is its parent's to know: -1 stands for any."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self.wait(0.0) if self.returncode is None else self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """As Popen's, but for None at 0 seconds."""
        if self.returncode is None:
            done = multiprocessing.connection.wait([self._pidfd], timeout)
            if not done and timeout:
                raise subprocess.TimeoutExpired("engine", timeout)
            if done:
                self.returncode = -1
                os.close(self._pidfd)
        return self.returncode


class Nursery:
    """The process with the imports, started with the first engine."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._socket = folder / "engines"
        self._log = folder / "engines.log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "tests.engine.forked", str(self._socket)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env)
        end = time.monotonic() + START_S
        while not self._socket.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"vLLM could not be imported: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def start(self, args_file: Path, env: dict[str, str], log: int, replies: int) -> Frontend:
        theirs, ours = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(START_S)
            link.connect(str(self._socket))
            socket.send_fds(link, [json.dumps({"args": str(args_file), "env": env}).encode()], [theirs, log, replies])
            os.close(theirs)
            return Frontend(int(link.recv(64)), ours)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(path: str) -> None:
    """Fork a frontend per request. End of input ends it."""
    for name in IMPORTS:
        importlib.import_module(name)
    _fork_for_spawn()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)  # whoever finds it can connect
    while multiprocessing.connection.wait([listener, sys.stdin]) == [listener]:
        link, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 3)
        pid = os.fork()
        if pid == 0:
            listener.close()
            link.close()
            _become_engine(json.loads(message), *descriptors)
        link.send(str(pid).encode())
        link.close()
        for fd in descriptors:
            os.close(fd)


def _become_engine(request: dict[str, Any], stdin: int, log: int, replies: int) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate((stdin, log, log)):
            os.dup2(fd, number)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.stdin = os.fdopen(0)
        from tests.engine import worker_engine

        asyncio.run(worker_engine.main(request["args"], replies))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_for_spawn() -> None:
    """Let vLLM fork. On CPUs it insists on fresh processes: OpenMP reads its variables when it is loaded. We set them by hand."""

    def context() -> BaseContext:
        return multiprocessing.get_context("fork")

    for module in USERS_OF_CONTEXT:
        importlib.import_module(module).get_mp_context = context
    os.register_at_fork(after_in_child=_bind_openmp)


def _bind_openmp() -> None:
    """Where vLLM has told OpenMP the CPUs of this process: in which variable depends on whose OpenMP it is."""
    import torch

    told = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES") or ""
    cpus = {int(cpu) for cpu in re.findall(r"\d+", told)}
    if cpus:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))


if __name__ == "__main__":
    serve(sys.argv[1])
