"""Every store on this host beside memmove and beside its library's own calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.live_services import live_service

from benchmarks.engines import source_path
from benchmarks.report import Report
from benchmarks.settings import Settings
from benchmarks.store_process import ANSWER

STORES = ("local", "mooncake", "memcache", "yuanrong")
FIGURES = r"(mooncake|memcache|yuanrong)_.*|local_(put|get|memcpy)_gbps|local_exists_1000_ms"
DRAM = 256 << 20
START_S, MEASURE_S, STOP_S = 30.0, 40.0, 10.0


def run(report: Report, settings: Settings) -> None:
    """A store that does not run on this machine gives figures that are null, with the reason."""
    for backend in STORES:
        folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm" if backend == "local" else None))
        try:
            with environment(backend, folder) as (env, prefix):
                found = measure(backend, folder, env, prefix, settings.quick)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            for name in expected(backend):
                report.missing(name, str(error))
        else:
            for name, value in found.items():
                report.add(f"{backend}_{name}", value)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def expected(backend: str) -> list[str]:
    """The figures that every run should have of a store."""
    names = ["put_gbps", "get_gbps", "exists_1000_ms"]
    if backend != "local":
        names += ["put_overhead", "get_overhead", "native_put_gbps", "native_get_gbps"]
    return [f"{backend}_{name}" for name in names]


@contextmanager
def environment(backend: str, folder: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A started service: variables for a process that uses it, and what comes before its command."""
    if backend == "local":
        yield {}, []
        return
    with live_service(backend, folder / "service", DRAM, START_S, STOP_S) as live:
        yield live.started.env, live.prefix


def measure(backend: str, folder: Path, env: dict[str, str], prefix: list[str], quick: bool) -> dict[str, float]:
    """In a process of its own. RuntimeError with the end of its output when it fails or takes too long."""
    command = [*prefix, sys.executable, "-m", "benchmarks.store_process", backend, str(folder), *(["--quick"] if quick else [])]
    variables = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(source_path())}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=MEASURE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"measuring {backend} took more than {MEASURE_S:g} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            found: dict[str, float] = json.loads(line.removeprefix(ANSWER))
            return found
    raise RuntimeError(f"measuring {backend} ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-2:])}")
