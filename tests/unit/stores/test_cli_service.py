"""`kvpool store start|stop|status|conformance`: mistakes are one line and exit status 2, before anything starts."""

import os
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.services import Started, processes
from kvpool.ops.services.ports import free_port
from kvpool.ops.services.processes import alive, save, spawn, stop_all


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch, tmp_path):
    """No service and no configuration of the user is met."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOONCAKE_CONFIG_PATH", "MMC_LOCAL_CONFIG_PATH", "YR_CONFIG_PATH", "DS_WORKER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def told(*arguments):
    result = CliRunner().invoke(app, ["store", *arguments])
    return result.exit_code, result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["start", "floppy"], "error: there is no service for 'floppy' (accepted: mooncake, memcache, yuanrong)"),
        (["start", "mooncake", "--dram", "lots"], "error: --dram 'lots': expected a size such as 1GB"),
        (["start", "mooncake", "--tenant", "a"], "error: --tenant 'a': expected NAME=QUOTA, such as a=200GB"),
        (["start", "memcache", "--tenant", "a=1GB"], "error: tenants: only mooncake has them, not memcache"),
        (["start", "mooncake", "--discovery", "etcd"], "error: discovery: only yuanrong has it, not mooncake"),
        (
            ["start", "mooncake", "--tenant", "a=1GB", "--tenant", "b=1GB", "--tenant", "a=2GB"],
            "error: --tenant 'a=2GB': a has the quota 1GB already; give each tenant once",
        ),
        (
            ["start", "mooncake", "--host", "9.9.9.9"],
            'error: --host="9.9.9.9": cannot be listened on (Cannot assign requested address); '
            "accepted: 127.0.0.1, or another IPv4 address of this host",
        ),
        (["stop", "floppy"], "error: there is no service for 'floppy' (accepted: mooncake, memcache, yuanrong)"),
        (["conformance", "floppy"], "error: backend 'floppy' is unknown (accepted: local, mooncake, memcache, yuanrong)"),
        (
            ["conformance", "mooncake"],
            "error: MOONCAKE_CONFIG_PATH is not set, and no service was started: set it, or run `kvpool store start mooncake`",
        ),
    ],
)
def test_mistakes(arguments, line):
    assert told(*arguments) == (2, line)


@pytest.mark.parametrize("name", ["posix_fallocate", "memfd_create"])
def test_the_local_store_says_in_one_line_that_it_needs_linux(name, monkeypatch):
    monkeypatch.delattr(os, name)
    code, output = told("conformance", "local")
    assert code == 2
    assert re.fullmatch(r"error: the local store needs Linux \(this is \w+\)", output)


@pytest.mark.parametrize("backend", ["mooncake", "memcache", "yuanrong"])
def test_what_was_not_started_has_no_state_and_nothing_is_stopped(backend, tmp_path):
    assert told("status", backend) == (1, "not started")
    folder = tmp_path / "kvpool" / "services" / backend
    assert told("stop", backend) == (0, f"nothing to stop: no service of {backend} ran in {folder}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stat", "--service", "memcache"], "error: --service 'memcache': cannot tell how full it is (accepted: mooncake)"),
        (["stat", "live", "--service", "mooncake"], "error: NAME and --root are of a local pool, not of --service"),
        (["stat", "--folder", "/tmp"], "error: --folder is of --service"),
        (
            ["stat", "--service", "mooncake", "--folder", "/missing"],
            "error: /missing holds no mooncake service: start one with `kvpool store start mooncake`",
        ),
    ],
)
def test_what_stat_cannot_tell(arguments, line):
    assert told(*arguments) == (2, line)


def state(folder, address):
    started = Started("mooncake", str(folder), [], {}, {"master": "127.0.0.1:1", "metrics": address})
    processes.save(started)


def test_stat_of_a_master_that_is_gone_or_is_none(tmp_path):
    address = f"http://127.0.0.1:{free_port()}"
    state(tmp_path, address)
    code, line = told("stat", "--service", "mooncake", "--folder", str(tmp_path))
    assert (code, line) == (2, f"error: {address}/metrics: [Errno 111] Connection refused")
    with serving({"/metrics": (200, "something_else 1\n")}) as address:
        state(tmp_path, address)
        code, line = told("stat", "--service", "mooncake", "--folder", str(tmp_path))
    assert (code, line) == (2, f"error: {address}/metrics: no master_total_capacity_bytes")


@contextmanager
def serving(pages):
    """An HTTP server with these pages, {path: (status, text)}; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = pages[self.path]
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def mooncake_of_this_folder(tmp_path):
    """The record of a service, with a process that can be stopped."""
    process = spawn("master", ["sleep", "600"], tmp_path)
    save(Started("mooncake", str(tmp_path), [process], {}, {"master": "127.0.0.1:1"}))
    yield process
    stop_all([process], 5)


@pytest.mark.parametrize("backend", ["memcache", "yuanrong"])
def test_another_stores_service_is_neither_stopped_nor_shown(backend, mooncake_of_this_folder, tmp_path):
    line = f"error: {tmp_path} holds a service of mooncake, not of {backend}"
    for verb in ("stop", "status"):
        assert told(verb, backend, "--folder", str(tmp_path)) == (2, line)
    assert alive(mooncake_of_this_folder)
    assert told("stop", "mooncake", "--folder", str(tmp_path)) == (0, "stopped")
    assert not alive(mooncake_of_this_folder)


def test_a_service_that_has_died_is_not_said_to_be_stopped(mooncake_of_this_folder, tmp_path):
    stop_all([mooncake_of_this_folder], 5)
    line = f"nothing to stop: no service of mooncake ran in {tmp_path}"
    assert told("stop", "mooncake", "--folder", str(tmp_path)) == (0, line)
    assert not (tmp_path / "state.json").exists()
