"""`kvpool store …` on a pool that is in use."""

from __future__ import annotations

import json

import pytest
from tests.unit.stores.helpers import get, has, key, opened, put
from typer.testing import CliRunner

from kvpool.cli import app

KEYS = [key(i) for i in range(5)] + [key(i, namespace="other") for i in range(3)]


@pytest.fixture
def live(pool_root):
    store = opened(pool_root, 4 << 20, name="live")
    put(store, KEYS)
    yield store
    store.close()


@pytest.fixture
def run(pool_root):
    def command(*words: str):
        return CliRunner().invoke(app, ["store", *words, "--root", str(pool_root)], env={"COLUMNS": "120"})

    return command


def test_stat_tells_how_full_and_how_many(live, run, pool_root):
    told = run("stat", "live", "--json")
    assert told.exit_code == 0
    numbers = json.loads(told.stdout)
    assert (numbers["objects"], numbers["users"], numbers["health"]) == (8, 1, "ok")
    assert 0 < numbers["used_bytes"] <= numbers["capacity_bytes"] == 4 << 20
    another = opened(pool_root, 4 << 20, name="live")
    assert json.loads(run("stat", "live", "--json").stdout)["users"] == 2
    another.close()
    table = run("stat", "live").stdout
    assert "pool live" in table
    assert "users" in table


def test_verify_finds_nothing_in_a_sound_pool(live, run):
    told = run("verify", "live")
    assert (told.exit_code, told.stdout) == (0, "0 findings\n")
    assert json.loads(run("verify", "live", "--json").stdout) == {"findings": []}


def test_verify_shows_what_it_finds_and_says_so_by_its_exit_status(live, run, monkeypatch):
    monkeypatch.setattr("kvpool.stores.local.store.gauges.verify", lambda pool: ["slot 3 is nobody's"])
    told = run("verify", "live")
    assert (told.exit_code, told.stdout) == (1, "slot 3 is nobody's\n1 findings\n")


def test_rm_removes_by_prefix_or_all(live, run):
    assert run("rm", "live", "--prefix", "v1:other:").stdout == "3 objects removed\n"
    assert has(live, KEYS) == [True] * 5 + [False] * 3
    assert json.loads(run("rm", "live", "--all", "--json").stdout) == {"removed": 5}
    assert get(live, KEYS[:2]) == [None, None]
    put(live, KEYS)
    assert all(has(live, KEYS)), "the pool goes on"


@pytest.mark.parametrize("words", [(), ("--all", "--prefix", "v1"), ("--prefix", "")])
def test_rm_asks_for_exactly_one_choice(live, run, words):
    told = run("rm", "live", *words)
    assert told.exit_code == 2
    assert "--prefix" in told.output
    assert all(has(live, KEYS))


@pytest.mark.parametrize("command", [("stat",), ("verify",), ("rm", "--all")])
@pytest.mark.parametrize("name", ["nobody", "../live"])
def test_a_pool_that_is_not_there_is_one_line_and_is_not_made(run, pool_root, command, name):
    told = run(command[0], name, *command[1:])
    assert told.exit_code == 2
    assert len(told.output.splitlines()) == 1
    assert name in told.output
    assert not (pool_root / "nobody").exists()


def test_a_store_of_no_such_name_is_one_line():
    told = CliRunner().invoke(app, ["store", "conformance", "nothing"])
    assert (told.exit_code, told.output) == (
        2,
        "error: backend 'nothing' is unknown (accepted: local, mooncake, memcache, yuanrong)\n",
    )


@pytest.mark.parametrize("failing", [False, True])
def test_conformance_ends_with_a_count(monkeypatch, failing):
    from kvpool.stores import conformance

    def check(bench) -> None:
        assert not failing, "as told"

    monkeypatch.setattr(conformance, "CHECKS", (check,))
    told = CliRunner().invoke(app, ["store", "conformance", "local"])
    assert told.exit_code == failing
    assert told.output.splitlines()[-1] == ("0 passed, 1 failed" if failing else "1 passed, 0 failed")
