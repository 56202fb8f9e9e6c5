"""Which CPUs the pool's threads and processes may use: not just the one that the engine has bound its own thread to.

vLLM binds a worker's main thread to one CPU, where it computes and spins. What that thread starts inherits the binding, and would
get next to no time beside it: seconds pass until a thread of ours runs at all.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OPENMP_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables by which vLLM binds a worker: in a process that inherits them, loading OpenMP binds its main thread."""
_NODES = Path("/sys/devices/system/node")


@contextmanager
def unbound() -> Iterator[None]:
    """Threads and processes that are started inside may run on every CPU of ``free_cpus``; the caller's own binding comes back."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with suppress(OSError):
            os.sched_setaffinity(0, free_cpus())
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def free_cpus() -> set[int]:
    """The caller's CPUs and those of the process that started this one by multiprocessing: the engine's, which is not bound.

    Only those on the NUMA nodes of the caller's: copies from another node are slow.
    """
    own, parent = os.sched_getaffinity(0), multiprocessing.parent_process()
    allowed = set(own)
    if parent is not None and parent.pid is not None:
        with suppress(OSError):  # it has ended
            allowed |= os.sched_getaffinity(parent.pid)
    near = [node for node in _nodes() if node & own]
    return own | allowed.intersection(set().union(*near)) if near else allowed


def usable_cpus() -> tuple[int, ...]:
    """The caller's CPUs in order; where the system does not tell them, as elsewhere than on Linux, all of the host."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _nodes() -> list[set[int]]:
    nodes = []
    for node in _NODES.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            nodes.append(cpu_list(node.joinpath("cpulist").read_text()))
    return nodes


def cpu_list(text: str) -> set[int]:
    """The CPUs of a list as the kernel writes it, such as ``0-3,8``. ValueError for other text."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
