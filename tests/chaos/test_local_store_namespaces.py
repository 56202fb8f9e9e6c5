"""Processes of several PID namespaces, such as containers, on one pool. Every byte that is read is verified."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos import store_worker as sw
from tests.chaos.test_local_store import Process, no_process_is_left, settled  # noqa: F401 - a fixture

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.fixture
def store(pool_root):
    store = sw.open_store(str(pool_root))
    yield store
    store.close()


@pytest.fixture
def pid_namespace():
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make a PID namespace")


def test_second_pid_namespace(store, pool_root, pid_namespace):
    """Process 1 of another namespace: liveness and locks must not go by pid."""
    inside = Process("work", pool_root, 3, 31, NAMESPACE).ready()
    worker = sw.Worker(store, 33)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        worker.turn()
    counts = inside.finish()
    assert counts["hit"] > 10, counts
    assert counts["put"] > 10, counts
    victim = Process("work", pool_root, 600, 34, NAMESPACE).ready()
    time.sleep(0.5)
    victim.kill()
    time.sleep(0.2)
    settled(store)


@pytest.mark.parametrize("end", ["at work", "killed", "stopped"])
def test_same_pid_in_two_namespaces(store, pool_root, pid_namespace, end):
    """Containers of one image: their processes have the same ids. One leaves, dies or stops under the others."""
    twins = [Process("work", pool_root, 4 if end == "at work" else 600, seed, NAMESPACE).ready() for seed in (31, 32)]
    third = Process("work", pool_root, 5, 33, NAMESPACE).ready()
    worker = sw.Worker(store, 34)
    run_for(worker, 1.5)
    if end == "killed":
        twins[0].kill()
    elif end == "stopped":
        inside = inner_process(twins[0])
        os.kill(inside, signal.SIGSTOP)
        run_for(worker, 1)
        os.kill(inside, signal.SIGCONT)
    run_for(worker, 2)
    counts = [third.finish(), *(twin.finish() for twin in twins if end == "at work")]
    assert all(count["hit"] > 20 and count["put"] > 20 for count in (*counts, worker.counts)), counts
    for twin in twins:
        if end != "at work" and twin.process.poll() is None:
            twin.kill()
    settled(store)


def run_for(worker: sw.Worker, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        worker.turn()


def inner_process(process: Process) -> int:
    """The worker below ``unshare --fork``, process 1 of its namespace, by its id out here."""
    outer = process.process.pid
    inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
    ids = [line.split()[1:] for line in Path(f"/proc/{inner}/status").read_text().splitlines() if line.startswith("NSpid:")]
    assert ids[0][-1] == "1", ids
    return inner
