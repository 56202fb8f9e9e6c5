"""A plan as processes, with small servers in place of engines: readiness, deaths, signals, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.ops.launch.descendants import descendants
from kvpool.ops.launch.plan import Place, Plan, PoolService, Process
from kvpool.ops.launch.run import Launch
from kvpool.ops.launch.signals import Signals, Told
from kvpool.ops.services.base import Service
from kvpool.ops.services.base import Started as ServiceStarted
from kvpool.ops.services.ports import free_port
from kvpool.ops.services.processes import load, save, spawn, start_time, stop_all, wait_until

SERVER = """
import http.server, os, subprocess, sys, threading, time
port, child = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
if child != "none":
    # a child in a session of its own, whose parent ends: nobody's child any more
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = "import subprocess as s, sys; deaf = [sys.executable, '-c', sys.argv[1]]; "
    code += "print(s.Popen(deaf, start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    pid = subprocess.run([sys.executable, "-c", code, deaf], capture_output=True, text=True, check=True).stdout
    with open(child, "w") as file:
        file.write(pid)
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
LAUNCH = """
import json, sys
from tests.unit.ops import test_launch_run as here
here.run_for_ever(*json.loads(sys.argv[1]))
"""
ROOT = Path(__file__).resolve().parents[3]


def server(name="a", child="none"):
    port = free_port()
    return Process(
        name, (sys.executable, "-c", SERVER, str(port), child), f"http://127.0.0.1:{port}/health", ports={"--port": port}
    )


def failing(code, name="b"):
    return Process(name, (sys.executable, "-c", code), "http://127.0.0.1:1/health")


class Started:
    """A launch in this process; ``said`` is its progress."""

    def __init__(self, folder, *processes, service=None, say=None, logs=None):
        self.said = []
        self._say = say or self.said.append
        self._plan = Plan(processes, "http://127.0.0.1:1", "m", service)
        self._place = Place(str(folder), str(folder), {}, "", sys.executable)
        self._logs = logs
        self._stack = ExitStack()

    def __enter__(self):
        signals = self._stack.enter_context(Signals())
        self.launch = self._stack.enter_context(Launch(self._plan, self._place, signals, self._say, self._logs))
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)


@pytest.fixture(autouse=True)
def before():
    """What other tests of this process have started, such as a resource tracker; nothing else may be left afterwards."""
    found = descendants()
    yield found
    assert not descendants() - found


def test_what_is_ready_is_told_and_ends_with_the_block(tmp_path, before):
    with Started(tmp_path, server("one"), server("two")) as started:
        started.launch.start(60)
        assert len(descendants() - before) >= 2
    for name in ("one", "two"):
        assert any(line.startswith(f"{name}: ready after") for line in started.said)
    assert started.said[-1] == "stopped"


def test_what_never_answers_is_given_up_at_the_deadline_with_its_last_lines(tmp_path):
    with Started(tmp_path, server(), failing("import time; print('loading', flush=True); time.sleep(600)")) as started:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"(?s)^b: no answer within 5 s.*loading"):
            started.launch.start(5)
        assert 5 <= time.monotonic() - began < 60


def test_what_dies_at_the_start_shows_its_last_lines_at_once(tmp_path):
    code = "import sys; print('line 1'); sys.exit('the model has no weights')"
    words = r"(?s)^b ended before it was ready.*line 1\nthe model has no weights$"
    with Started(tmp_path, server(), failing(code)) as started, pytest.raises(OSError, match=words):
        started.launch.start(60)


@pytest.mark.parametrize("stays", [False, True])
def test_a_log_is_named_at_the_end_only_where_it_will_still_be_there(stays, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    with Started(folder, failing("raise SystemExit('no')"), logs=logs if stays else None) as started:
        with pytest.raises(OSError, match=r"(?s)^b ended before it was ready") as ended:
            started.launch.start(60)
        with pytest.raises(OSError, match=r"^b ended"):
            started.launch.watch()
    assert (str(logs / "b.log") in str(ended.value)) is stays
    assert str(folder) not in str(ended.value)


def test_a_service_that_does_not_come_up_shows_its_last_lines_and_no_log_that_is_gone(tmp_path, sleeper):
    def dies():
        ended = spawn("second", [sys.executable, "-c", "print('first'); print('last')"], tmp_path / "service")
        wait_until(lambda: False, [ended], 60)

    sleeper.interrupt = dies
    with Started(tmp_path, server(), service=POOL) as started, pytest.raises(OSError, match=r"^second ended: last") as ended:
        started.launch.start(60)
    assert str(ended.value).endswith("first\nlast")
    assert str(tmp_path) not in str(ended.value)


def test_what_dies_later_ends_the_watch(tmp_path, before):
    dying = server()
    with Started(tmp_path, dying) as started:
        started.launch.start(60)
        ((pid, _),) = descendants() - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"(?s)^a ended; the end of its log.*serving"):
            started.launch.watch()


def test_children_of_children_in_sessions_of_their_own_end_too(tmp_path):
    mark = tmp_path / "pid"
    with Started(tmp_path, server(child=str(mark))) as started:
        started.launch.start(60)
        pid = int(mark.read_text())
        assert start_time(pid)
    assert not start_time(pid)
    assert any(line.startswith("had to be killed") for line in started.said)


def test_processes_that_were_there_before_stay(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:
            with Started(tmp_path, server()) as started:
                started.launch.start(60)
            assert other.poll() is None
        finally:
            other.kill()


class Sleeper(Service):
    """A store's service of one process that sleeps. ``interrupt`` is called when it has started."""

    backend = "sleeper"

    def __init__(self, interrupt=lambda: None, stopping=lambda: None):
        self.interrupt, self.stopping, self.deadlines, self.stopped = interrupt, stopping, [], 0

    def start(self, folder, deadline_s):
        self.deadlines.append(deadline_s)
        folder.mkdir(exist_ok=True)
        running = [spawn("owner", [sys.executable, "-c", "import time; print('mine', flush=True); time.sleep(600)"], folder)]
        started = ServiceStarted(self.backend, str(folder), running, {})
        save(started)
        self.interrupt()
        return started

    def stop(self, folder, deadline_s):
        started = load(folder)
        if started is None:
            return []
        self.stopping()
        self.stopped += 1
        return stop_all(started.processes, deadline_s)

    def status(self, folder):
        return {}


POOL = PoolService("sleeper", 1, 0)


@pytest.fixture
def sleeper(monkeypatch):
    made = Sleeper()
    monkeypatch.setattr("kvpool.ops.launch.run.service", lambda *given, **more: made)
    return made


def test_everything_ends_although_nobody_listens_any_more(tmp_path, before):
    """After SIGHUP the terminal is gone: writing to it fails."""
    gone = []

    def say(line):
        if gone:
            raise OSError(5, "Input/output error")

    with Started(tmp_path, server(), say=say) as started:
        started.launch.start(60)
        gone.append(True)
        assert descendants() - before
    assert not descendants() - before


def test_a_service_that_dies_later_ends_the_watch(tmp_path, sleeper):
    with Started(tmp_path, server(), service=POOL) as started:
        started.launch.start(60)
        started.launch.signal_service(signal.SIGKILL)
        with pytest.raises(OSError, match=r"(?s)^owner of the pool's service ended; the end of its log.*mine"):
            started.launch.watch()


def test_a_service_that_was_interrupted_at_the_end_of_its_start_is_stopped(tmp_path, sleeper):
    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    sleeper.interrupt = interrupt
    with pytest.raises(Told), Started(tmp_path, server(), service=POOL) as started:
        started.launch.start(60)
    assert sleeper.stopped == 1, "in order: a service may have more to tidy up than processes"


def test_what_is_left_of_a_service_that_cannot_be_stopped_is_killed(tmp_path, sleeper, before):
    def damaged():
        raise OSError("state.json is damaged")

    sleeper.stopping = damaged
    with pytest.raises(OSError, match="damaged"), Started(tmp_path, service=POOL) as started:
        started.launch.start(60)
    assert not descendants() - before


def test_the_deadline_is_for_service_and_engines_together(tmp_path, sleeper):
    sleeper.interrupt = lambda: time.sleep(5)
    with Started(tmp_path, failing("import time; time.sleep(600)"), service=POOL) as started:
        began = time.monotonic()
        with pytest.raises(OSError, match=r"^b: no answer within 6 s"):
            started.launch.start(6)
        assert time.monotonic() - began < 6 + 4.5
    assert sleeper.deadlines == [6]


def run_for_ever(folder, mark):
    """In a process of its own: a launch that a signal ends."""
    try:
        with Started(folder, server(child=mark)) as started:
            started.launch.start(60)
            print("ready", flush=True)
            started.launch.watch()
    except Told as told:
        print(json.dumps({"told": told.number}), flush=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_children_and_their_children(number, tmp_path):
    mark = tmp_path / "pid"
    command = [sys.executable, "-c", LAUNCH, json.dumps([str(tmp_path), str(mark)])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            process.send_signal(number)  # impatience changes nothing
            assert json.loads(process.stdout.readline()) == {"told": number}
            assert process.wait(90) == 0
        finally:
            process.kill()
    assert not start_time(int(mark.read_text()))


def test_a_signal_in_a_held_block_is_raised_at_its_end():
    reached = []
    try:
        with Signals() as signals:
            with signals.held():
                os.kill(os.getpid(), signal.SIGTERM)
                reached.append("end of the block")
            reached.append("beyond")
    except Told as told:
        reached.append(told.exit_code)
    assert reached == ["end of the block", 143]


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
