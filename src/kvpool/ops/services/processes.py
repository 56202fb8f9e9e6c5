"""Processes of a service: started in sessions of their own, found again by pid and start time, stopped with a deadline."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kvpool.ops.services.base import Running, Started

STATE = "state.json"
_TICK_S = 0.05


class StartError(OSError):
    """A process did not come up: ``reason`` in one line, ``log`` is the path of its log."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"{reason} (log: {log})")
        self.reason, self.log = reason, log


def spawn(name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Running:
    """Start one process; its output goes to ``<folder>/<name>.log``. OSError where it cannot be started."""
    log = folder / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            env=env and dict(env),
            start_new_session=True,
        )
    return Running(name, process.pid, start_time(process.pid), str(log))


def start_time(pid: int) -> int:
    """In clock ticks since boot; 0 where there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def alive(process: Running) -> bool:
    with suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)  # ours: do not leave a zombie
    return process.started != 0 and start_time(process.pid) == process.started


def wait_until(ready: Callable[[], bool], processes: Sequence[Running], deadline_s: float) -> None:
    """StartError, with the end of the log, when a process ends before it is ready, or the time is over."""
    end = time.monotonic() + deadline_s
    while not ready():
        for process in processes:
            if not alive(process):
                raise StartError(f"{process.name} ended: {last_line(process)}", process.log)
        if time.monotonic() > end:
            names = ", ".join(process.name for process in processes)
            raise StartError(f"{names} did not answer within {deadline_s:g} s", processes[-1].log)
        time.sleep(_TICK_S)


def last_line(process: Running) -> str:
    try:
        lines = Path(process.log).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "no output"


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def stop_all(processes: Sequence[Running], deadline_s: float) -> list[str]:
    """SIGTERM to each whole session, in reverse order of their start, SIGKILL after the deadline; the names of those killed."""
    killed = []
    for process in reversed(processes):
        end = time.monotonic() + deadline_s
        _signal(process, signal.SIGTERM)
        while alive(process) and time.monotonic() < end:
            time.sleep(_TICK_S)
        if alive(process):
            killed.append(process.name)
            _signal(process, signal.SIGKILL)
            while alive(process) and time.monotonic() < end + 5:
                time.sleep(_TICK_S)
    return killed


def _signal(process: Running, number: int) -> None:
    if alive(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def save(started: Started, folder: Path | None = None) -> None:
    """Into its folder, or into another one, for ``load``."""
    path = (folder or Path(started.folder)) / STATE
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(started), indent=2))
    aside.replace(path)


def refuse_running(folder: Path) -> None:
    """ValueError where the folder holds a service that runs."""
    before = load(folder)
    if before is not None and any(alive(process) for process in before.processes):
        raise ValueError(f"{folder} holds a {before.backend} service that runs: stop it first")


def load(folder: Path, backend: str | None = None) -> Started | None:
    """What was started in this folder; None where nothing was. OSError where the record is damaged, ValueError where it is not of
    ``backend``."""
    try:
        raw = json.loads((folder / STATE).read_text())
        processes = [Running(**process) for process in raw.pop("processes")]
        started = Started(processes=processes, **raw)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{folder / STATE} is damaged: {error}") from None
    if backend not in (None, started.backend):
        raise ValueError(f"{folder} holds a service of {started.backend}, not of {backend}")
    return started
