"""`kvpool store start|stop|status|conformance`: mistakes are one line and exit status 2, before anything starts."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.services import Started, processes
from kvpool.ops.services.ports import free_port


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


@pytest.mark.parametrize("backend", ["mooncake", "memcache", "yuanrong"])
def test_what_was_not_started_has_no_state_and_is_stopped_already(backend):
    assert told("status", backend) == (1, "not started")
    assert told("stop", backend) == (0, "stopped")


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
