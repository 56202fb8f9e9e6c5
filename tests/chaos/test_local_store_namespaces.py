"""Processes of several PID namespaces, such as containers, on one pool. Every byte that is read is verified."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos import store_worker as sw
from tests.chaos.test_local_store import Process, no_process_is_left, settled  # noqa: F401 - a fixture
from tests.waiting import eventually

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
    inside = Process("work", pool_root, 31, NAMESPACE).ready()
    worker = sw.Worker(store, 33)
    worker.take_turns(3)
    inside.finish()  # having stored and found many
    victim = Process("work", pool_root, 34, NAMESPACE).ready()
    time.sleep(0.5)
    killed(victim)
    settled(store)


@pytest.mark.parametrize("end", ["at work", "killed", "stopped"])
def test_same_pid_in_two_namespaces(store, pool_root, pid_namespace, end):
    """Containers of one image: their processes have the same ids. One leaves, dies or stops under the others."""
    twins = [Process("work", pool_root, seed, NAMESPACE).ready() for seed in (31, 32)]
    third = Process("work", pool_root, 33, NAMESPACE).ready()
    worker = sw.Worker(store, 34)
    worker.take_turns(1.5)
    if end == "at work":
        twins.pop(0).finish()
    elif end == "killed":
        killed(twins.pop(0))
    elif end == "stopped":
        inside = inner_process(twins[0])
        os.kill(inside, signal.SIGSTOP)
        worker.take_turns(1)
        os.kill(inside, signal.SIGCONT)
    worker.take_turns(2)
    third.finish()  # having stored and found many
    for twin in twins:
        killed(twin)
    settled(store)


def killed(process: Process) -> None:
    """What is killed is ``unshare``; the worker dies with it, a little later."""
    inside = inner_process(process)
    process.kill()
    eventually(lambda: not Path(f"/proc/{inside}").exists(), "the worker is dead")


def inner_process(process: Process) -> int:
    """The worker below ``unshare --fork``, process 1 of its namespace, by its id out here."""
    outer = process.process.pid
    inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
    ids = [line.split()[1:] for line in Path(f"/proc/{inner}/status").read_text().splitlines() if line.startswith("NSpid:")]
    assert ids[0][-1] == "1", ids
    return inner
