"""Threads and processes of the pool are not bound to the one CPU of the thread that starts them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

from kvpool.devices.affinity import cpu_list, unbound

needs_two_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU, or no bindings"
)


def bound_worker(answers: SimpleQueue[Any], cpu: int) -> None:
    """What an engine's worker does: it is bound, then starts a thread and a process of ours."""
    os.sched_setaffinity(0, {cpu})
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with unbound():
        thread.start()
        child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    thread.join()
    with suppress(KeyError), unbound():
        raise KeyError
    answers.put((seen[0], set(json.loads(child.stdout)), os.sched_getaffinity(0)))


def near(allowed: set[int]) -> set[int]:
    """Of these, those on the NUMA node of the first."""
    files = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    nodes = [node for node in (cpu_list(file.read_text()) for file in files) if min(allowed) in node]
    return allowed & nodes[0] if nodes else allowed


@needs_two_cpus
def test_what_a_bound_worker_starts_is_free_and_the_worker_stays_bound() -> None:
    allowed = os.sched_getaffinity(0)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    worker = context.Process(target=bound_worker, args=(answers, min(allowed)))
    worker.start()
    worker.join(200)
    assert worker.exitcode == 0
    thread, process, itself = answers.get()
    assert thread == process == near(allowed)
    assert itself == {min(allowed)}


@needs_two_cpus
def test_a_binding_by_the_operator_stays() -> None:
    """Nobody but the operator binds a process that no engine started."""
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    code = "import os; from kvpool.devices.affinity import free_cpus; print(sorted(free_cpus()))"
    try:
        os.sched_setaffinity(0, {one})
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    finally:
        os.sched_setaffinity(0, allowed)
    assert json.loads(child.stdout) == [one]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0,2-2", {0, 2})],
    ids=["both", "one", "none", "same"],
)
def test_lists_as_the_kernel_writes_them(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus
