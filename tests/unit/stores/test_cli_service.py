"""`kvpool store start|stop|status|conformance`: mistakes are one line and exit status 2, before anything starts."""

import os
import re

import pytest
from typer.testing import CliRunner

from kvpool.cli import app


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


@pytest.mark.parametrize("name", ["posix_fallocate", "memfd_create"])
def test_the_local_store_says_in_one_line_that_it_needs_linux(name, monkeypatch):
    monkeypatch.delattr(os, name)
    code, output = told("conformance", "local")
    assert code == 2
    assert re.fullmatch(r"error: the local store needs Linux \(this is \w+\)", output)


@pytest.mark.parametrize("backend", ["mooncake", "memcache", "yuanrong"])
def test_what_was_not_started_has_no_state_and_is_stopped_already(backend):
    assert told("status", backend) == (1, "not started")
    assert told("stop", backend) == (0, "stopped")
