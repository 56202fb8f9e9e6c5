"""All processes that come from this one, however they were started: children of children, in sessions of their own, orphans too."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpool.ops.services.processes import start_time

_SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans below us become our children, and so stay below us
_TICK_S = 0.05
_SEGMENTS = re.compile(r"(/dev/shm/(?:psm_|vllm_|sem\.mp-|memfabric_hybrid_)[^/\n]*)$", re.MULTILINE)


class Descendant(tuple[int, int]):
    """pid and start time, so that a reused pid is not taken for it."""


@contextmanager
def adopting() -> Iterator[set[Descendant]]:
    """Within this block no descendant gets lost. Those that were there before are given: they are not ours to end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("processes are started, and ended again, on Linux only")
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield descendants()
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants() -> set[Descendant]:
    """Live ones, of this process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[Descendant] = set()
    left = list(children.get(os.getpid(), []))
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        if started := start_time(pid):
            found.add(Descendant((pid, started)))
    return found


def of_sessions(leaders: set[int]) -> set[Descendant]:
    """Live processes, of whatever parent, in the sessions of these leaders."""
    found: set[Descendant] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                if session in leaders and (started := start_time(int(entry.name))):
                    found.add(Descendant((int(entry.name), started)))
    return found


def end_all(but: set[Descendant], grace_s: float, kill_s: float) -> int:
    """Wait ``grace_s`` for those that are ending, kill the others; how many had to be killed. Zombies among them are reaped."""
    _until_gone(but, grace_s)
    killed: set[Descendant] = set()
    end = time.monotonic() + kill_s
    while (left := descendants() - but) and time.monotonic() < end:
        for pid, started in left:
            if start_time(pid) == started:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        killed |= left
        _reap(left)
        time.sleep(_TICK_S)
    return len(killed)


def end_session(leader: int, grace_s: float, kill_s: float) -> None:
    """Wait ``grace_s`` until none of a child's process group is left, then kill it. Within ``adopting`` orphans are reaped here."""
    began = time.monotonic()
    while time.monotonic() < began + grace_s + kill_s:
        try:
            os.killpg(leader, 0 if time.monotonic() < began + grace_s else signal.SIGKILL)
        except ProcessLookupError:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-leader, os.WNOHANG)[0]:
                pass
        time.sleep(_TICK_S)


def _until_gone(but: set[Descendant], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while (left := descendants() - but) and time.monotonic() < end:
        _reap(left)
        time.sleep(_TICK_S)


def _reap(processes: set[Descendant]) -> None:
    for pid, _ in processes:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def shared_segments(processes: set[Descendant]) -> set[Path]:
    """Shared memory of vLLM (message queues, collectives) and MemCache that they have mapped: killed processes leave it behind."""
    found: set[Path] = set()
    for pid, _ in processes:
        with suppress(OSError):
            found.update(map(Path, _SEGMENTS.findall(Path(f"/proc/{pid}/maps").read_text())))
    return found


def remove(segments: set[Path]) -> None:
    """Those that are still there."""
    for path in segments:
        with suppress(OSError):
            path.unlink()
