"""kill -9 of a launch, of the process that guards it, and of both: nothing that it has started stays."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.unit.ops.test_launch_run import ROOT, server
from tests.waiting import eventually

from kvpool.ops.launch import LaunchOptions, Plan, Told, launched
from kvpool.ops.launch.abandoned import PREFIX, SHARED_MEMORY, end_abandoned, owned
from kvpool.ops.launch.guard import guarded
from kvpool.ops.services.processes import start_time

RUN = "import sys; from tests.unit.ops import test_launch_guard as here; sys.exit(here.run(sys.argv[1]))"
END_S = 40.0


def run(mark):
    """In a process of its own: a guarded launch of one server, whose child nobody waits for. It tells pids and folder."""

    def launch():
        places = []

        def plan(options, place):
            places.append(place)
            return Plan((server(child=mark),), "", "")

        try:
            with launched(LaunchOptions("mixed", "m"), lambda line: print(line, flush=True), 60, plan=plan) as (_, launch):
                (running,) = [running for _, running in launch._running]
                told = {"launch": os.getpid(), "server": running.pid, "folders": [places[0].folder, places[0].shared]}
                print(json.dumps(told), flush=True)
                launch.watch()
        except Told as told:
            return told.exit_code
        return 0

    return guarded(launch, lambda line: print(line, flush=True))


class Guarded:
    """``process`` is the guard, ``pids`` are the launch, its server and, where there is one, the server's child."""

    def __init__(self, process, mark):
        self.process = process
        told = {}
        while not told:
            line = process.stdout.readline()
            assert line, "it ended"
            with suppress(ValueError):
                told = json.loads(line)
        self.launch, self.server = told["launch"], told["server"]
        self.folders = [Path(folder) for folder in told["folders"]]
        self.pids = [self.launch, self.server] + ([int(Path(mark).read_text())] if mark != "none" else [])

    def left(self):
        return [pid for pid in self.pids if start_time(pid)] + [str(folder) for folder in self.folders if folder.exists()]

    def nothing_is_left(self):
        eventually(lambda: not self.left(), f"the end of {self.pids}", END_S)


@contextmanager
def guarded_launch(tmp_path, child=True):
    mark = str(tmp_path / "pid") if child else "none"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN, mark]
    pids = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True) as process:
        try:
            made = Guarded(process, mark)
            pids = made.pids
            assert made.launch != process.pid
            assert len(made.left()) == len(made.pids) + 2
            yield made
        finally:
            for pid in (process.pid, *pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_launch_is_ended_by_its_guard(tmp_path):
    with guarded_launch(tmp_path) as made:
        os.kill(made.launch, signal.SIGKILL)
        said, _ = made.process.communicate(timeout=END_S)
        assert made.process.returncode == 137
        assert "killed by signal 9" in said
        assert made.left() == []


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its process group"])
def test_a_launch_whose_guard_is_killed_ends_itself(tmp_path, kill):
    with guarded_launch(tmp_path) as made:
        kill(made.process.pid, signal.SIGKILL)
        made.process.wait(END_S)
        made.nothing_is_left()


def test_what_is_left_when_both_are_killed_is_ended_by_the_next_launch(tmp_path):
    with guarded_launch(tmp_path, child=False) as made:
        os.kill(made.process.pid, signal.SIGSTOP)  # so that neither can do anything about the other
        os.kill(made.launch, signal.SIGKILL)
        os.kill(made.process.pid, signal.SIGKILL)
        made.process.wait(END_S)
        time.sleep(1.0)
        assert made.left() == [made.server, *map(str, made.folders)]
        said = []
        end_abandoned(said.append)
        made.nothing_is_left()
        assert "ending what a killed launch has left: a" in said


def test_signals_reach_the_launch(tmp_path):
    with guarded_launch(tmp_path) as made:
        made.process.send_signal(signal.SIGTERM)
        made.process.communicate(timeout=END_S)
        assert made.process.returncode == 143
        assert made.left() == []


def test_the_status_of_the_child_is_that_of_the_guard():
    code = "import sys; from kvpool.ops.launch.guard import guarded; sys.exit(guarded(lambda: {}, print))"
    for body, status in (("7", 7), ("1 / 0", 1), ("__import__('os').abort()", 134)):
        done = subprocess.run([sys.executable, "-c", code.format(body)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert ("ZeroDivisionError" in done.stderr) == (status == 1)


def test_only_the_folders_of_dead_launches_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr("kvpool.ops.launch.abandoned.SHARED_MEMORY", tmp_path)
    assert tmp_path != SHARED_MEMORY
    alive, dead, unknown = (tmp_path / f"{PREFIX}{name}" for name in ("alive", "dead", "unknown"))
    for folder in (alive, dead, unknown):
        folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    with owned(dead):
        pass
    (elsewhere / "owner").touch()
    with owned(alive):
        end_abandoned(print)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["elsewhere", f"{PREFIX}alive", f"{PREFIX}link", f"{PREFIX}unknown"]
        )
    end_abandoned(print)
    assert not alive.exists()
