"""What killed launches have left: a launch holds a lock while it lives, and writes down what it has started."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpool.ops.launch import descendants
from kvpool.ops.services import BACKENDS, Running, Started, service
from kvpool.ops.services.processes import alive, load, save, stop_all

PREFIX = "kvpool-up-"  # of the folders of a launch
SHARED_MEMORY = Path("/dev/shm")
SERVICE = "service"  # the folder of the pool's service, in that of the launch
STOP_S, GRACE_S, KILL_S = 20.0, 3.0, 5.0
_LOCK = "owner"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """The folder belongs to a launch of this process until the end of the block, or of the process."""
    aside = folder / f"{_LOCK}.new"
    with aside.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        aside.rename(folder / _LOCK)  # locked before it can be seen
        yield


def write_down(shared: str, folder: str, backend: str, running: list[Running]) -> None:
    """For whoever comes after a kill. ``shared`` is the owned folder, ``folder`` that of logs and of the service of ``backend``."""
    save(Started(backend, folder, running, {}), Path(shared))


def end_abandoned(say: Callable[[str], None]) -> None:
    """End what launches of this user have started that are dead themselves, in order, and remove their folders."""
    for parent in dict.fromkeys((SHARED_MEMORY, Path(tempfile.gettempdir()))):
        for folder in sorted(parent.glob(f"{PREFIX}*")):
            with suppress(FileNotFoundError):
                if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink():
                    _end_if_abandoned(folder, say)


def _end_if_abandoned(folder: Path, say: Callable[[str], None]) -> None:
    with (folder / _LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # it lives, or somebody else is at it
        try:
            started = load(folder)
            if started is not None:
                _end(started, say)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _end(started: Started, say: Callable[[str], None]) -> None:
    """The pool's service ends last, and only what is still the process that was started is touched."""
    running = [process for process in started.processes if alive(process)]
    segments = descendants.shared_segments(descendants.of_sessions({process.pid for process in running}))
    if running:
        say(f"ending what a killed launch has left: {', '.join(process.name for process in running)}")
    stop_all(running, STOP_S)
    for process in running:
        descendants.end_session(process.pid, GRACE_S, KILL_S)
    descendants.remove(segments)
    folder = Path(started.folder)
    if started.backend in BACKENDS:
        service(started.backend).stop(folder / SERVICE, STOP_S)
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
