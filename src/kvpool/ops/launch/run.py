"""A plan as processes: start them, wait until they answer, watch them, stop them all."""

from __future__ import annotations

import http.client
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import kvpool
from kvpool.ops.launch import descendants
from kvpool.ops.launch.abandoned import GRACE_S, KILL_S, SERVICE, STOP_S, write_down
from kvpool.ops.launch.plan import Place, Plan, Process
from kvpool.ops.launch.signals import Signals
from kvpool.ops.services import Running, Service, service
from kvpool.ops.services.processes import StartError, alive, load, spawn, stop_all

LOOK_S, PROGRESS_S, ANSWER_S = 0.25, 10.0, 2.0
SERVICE_S = 90.0
TAIL_LINES = 12
WIN_OVER_FILES = (  # variables that would lead engines to another store than the launch's
    "MOONCAKE_CONFIG_PATH",
    "MOONCAKE_MASTER",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "MMC_LOCAL_CONFIG_PATH",
    "MMC_META_CONFIG_PATH",
    "YR_CONFIG_PATH",
    "DS_WORKER_ADDR",
)


class Launch:
    """Use as a context manager: leaving it ends every process that it has started, and what those have started, and removes the
    shared memory that they leave. ``say`` gets progress, line by line."""

    def __init__(self, plan: Plan, place: Place, signals: Signals, say: Callable[[str], None], logs: Path | None = None) -> None:
        self._plan, self._place, self._signals, self._teller = plan, place, signals, say
        self._folder = Path(place.folder)
        self._logs = logs or self._folder
        self._service: Service | None = None
        self._running: list[tuple[Process, Running]] = []
        self._env: Mapping[str, str] = {}  # where the service is
        self._killed_segments: set[Path] = set()
        self._adopting = descendants.adopting()
        self._others: set[descendants.Descendant] = set()

    def __enter__(self) -> Launch:
        self._others = self._adopting.__enter__()
        self._write_down()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._signals.ignore()
        try:
            self._stop()
        finally:
            self._adopting.__exit__(None, None, None)

    def start(self, deadline_s: float) -> None:
        """Start everything and wait until all answer. OSError, with the last lines of a log, where that fails or takes longer."""
        began = time.monotonic()
        if self._plan.service is not None:
            self.start_service(min(SERVICE_S, deadline_s))
        for process in self._plan.processes:
            self._spawn(process)
        self._wait(list(self._running), deadline_s, began)

    def add(self, process: Process, deadline_s: float) -> None:
        """Start one more process and wait until it answers. OSError as for ``start``; what did not come up is ended."""
        self._spawn(process)
        try:
            self._wait(self._running[-1:], deadline_s, time.monotonic())
        except OSError:
            self.kill(process.name)
            raise

    def end(self, name: str, deadline_s: float) -> None:
        """End one process in order, after the deadline with SIGKILL. What it has started has time to tidy up after it."""
        running = self._forget(name)
        stop_all([running], deadline_s)
        descendants.end_session(running.pid, GRACE_S, KILL_S)

    def kill(self, name: str) -> None:
        """SIGKILL to one process and to all in its session; nothing is shut down."""
        descendants.end_session(self._forget(name).pid, 0.0, KILL_S)

    def _forget(self, name: str) -> Running:
        running = self._found(name)
        self._killed_segments |= descendants.shared_segments(descendants.descendants() - self._others)
        self._running = [pair for pair in self._running if pair[1] is not running]
        return running

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one process and all in its session."""
        os.killpg(self._found(name).pid, number)

    def signal_service(self, number: int) -> None:
        """Send a signal to every process of the pool's service."""
        for running in self._of_service():
            if alive(running):
                os.killpg(running.pid, number)

    def watch(self) -> None:
        """Until a process, or one of the pool's service, ends by itself: OSError with its last lines. (A signal ends it too.)"""
        service = [(f"{running.name} of the pool's service", running) for running in self._of_service()]
        while True:
            self._refuse_dead("ended")
            for name, running in service:
                if not alive(running):
                    raise OSError(self._end_of(name, "ended", running.log))
            time.sleep(LOOK_S)

    def _of_service(self) -> list[Running]:
        started = load(self._folder / SERVICE)
        return started.processes if started is not None else []

    def start_service(self, deadline_s: float = SERVICE_S) -> None:
        """The plan's service, in place of the one that was started before. Only processes started from now on know where it is."""
        wanted = self._plan.service
        assert wanted is not None
        self._say(f"pool service {wanted.backend}: starting")
        made = service(
            wanted.backend,
            dram_bytes=wanted.owner_dram,
            engine_dram_bytes=wanted.engine_dram,
            sockets_in=self._place.shared,
        )
        folder = self._folder / SERVICE
        made.stop(folder, STOP_S)
        self._write_down()
        self._service = made  # before it starts: a signal may come between its start and the next line
        try:
            started = made.start(folder, deadline_s)  # ends what it has started when it is interrupted
        except StartError as error:
            raise OSError(f"{error.reason}\n{_tail_of(error.log)}") from None  # the log goes with the launch
        for name, address in started.addresses.items():
            self._say(f"pool service {wanted.backend}: {name} at {address}")
        for note in started.notes:
            self._say(f"note: {note}")
        self._env = started.env

    def _spawn(self, process: Process) -> None:
        source = str(Path(kvpool.__file__).resolve().parents[1])
        paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        inherited = {name: value for name, value in os.environ.items() if name not in WIN_OVER_FILES}
        whole = {
            **inherited,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths),
            "PYTHONUNBUFFERED": "1",
            **self._env,
            **process.env,
        }
        with self._signals.held():
            running = spawn(process.name, process.command, self._logs, whole)
            self._running.append((process, running))
            self._write_down()
        where = ", ".join(f"{flag} {port}" for flag, port in process.ports.items())
        log = "log" if self._stays(running.log) else "log while it runs"
        self._say(f"{process.name}: starting ({where}; {log}: {running.log})")

    def _write_down(self) -> None:
        backend = self._plan.service.backend if self._plan.service is not None else ""
        write_down(self._place.shared, self._place.folder, backend, [running for _, running in self._running])

    def _wait(self, waiting: list[tuple[Process, Running]], deadline_s: float, began: float) -> None:
        """``began``: when the time of ``deadline_s`` seconds did."""
        told = time.monotonic()
        while waiting:
            self._refuse_dead("ended before it was ready")
            for process, running in list(waiting):
                if answers(process.ready):
                    waiting.remove((process, running))
                    self._say(f"{process.name}: ready after {time.monotonic() - began:.0f} s")
            now = time.monotonic()
            if waiting and now - began > deadline_s:
                shown = "\n".join(self._end_of(process.name, "is still silent", running.log) for process, running in waiting)
                raise OSError(f"{_names(waiting)}: no answer within {deadline_s:g} s\n{shown}")
            if waiting and now - told > PROGRESS_S:
                told = now
                self._say(f"waiting for {_names(waiting)} ({now - began:.0f} s of {deadline_s:g})")
            time.sleep(LOOK_S)

    def _refuse_dead(self, words: str) -> None:
        for process, running in self._running:
            if not alive(running):
                raise OSError(self._end_of(process.name, words, running.log))

    def _end_of(self, name: str, words: str, log: str) -> str:
        """With the path of the log only where that will still be there."""
        where = f" ({log})" if self._stays(log) else ""
        return f"{name} {words}; the end of its log{where}:\n{_tail_of(log)}"

    def _stays(self, log: str) -> bool:
        """Whether it outlives the launch, whose folder goes with it."""
        return self._folder not in Path(log).parents

    def _found(self, name: str) -> Running:
        return next(running for process, running in self._running if process.name == name)

    def _stop(self) -> None:
        """Whatever fails on the way, in the end every descendant that is left is killed."""
        ours = descendants.descendants() - self._others
        if ours:
            self._say("stopping")
        segments = descendants.shared_segments(ours) | self._killed_segments
        killed: list[str] = []
        late = 0
        try:
            killed += stop_all([running for _, running in self._running], STOP_S)
            if self._service is not None:
                killed += self._service.stop(self._folder / SERVICE, STOP_S)
        finally:
            late = descendants.end_all(self._others, GRACE_S, KILL_S)
            descendants.remove(segments)
        if killed or late:
            self._say(f"had to be killed: {', '.join(killed) or f'{late} processes that others had started'}")
        if left := descendants.descendants() - self._others:
            self._say(f"still there: {', '.join(str(pid) for pid, _ in left)}")
        elif ours:
            self._say("stopped")

    def _say(self, line: str) -> None:
        """Nobody may be listening any more: the terminal is gone after SIGHUP, or the pipe. That must not keep us from stopping."""
        with suppress(OSError, ValueError):
            self._teller(line)


def answers(url: str) -> bool:
    """Whether GET answers 200 within two seconds. (Proxies of the environment are not asked.)"""
    parts = urllib.parse.urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        link.request("GET", parts.path)
        return link.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        link.close()


def _tail_of(log: str) -> str:
    """Its last lines."""
    try:
        lines = Path(log).read_text(errors="replace").rstrip().splitlines()
    except OSError:
        lines = []
    return "\n".join(line[:500] for line in lines[-TAIL_LINES:]) or "(no output)"


def _names(waiting: list[tuple[Process, Running]]) -> str:
    return ", ".join(process.name for process, _ in waiting)
