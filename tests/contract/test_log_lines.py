"""The lines that operators of the guides look for, and how long they may get."""

from __future__ import annotations

import re

import pytest

from kvpool.core.jobs import JobPart, SaveJob
from kvpool.stores.base import Result, Status

PROMPT = list(range(100, 200))
LINE = r"Failed to {} (\d+) keys out of (\d+) for request (\S+), error_codes=\[(.*)\]"


@pytest.fixture
def errors(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr("kvpool.engine.transfers.logger.error", lambda text, *words: lines.append(text % words))
    return lines


def test_a_failed_load_names_the_codes_of_the_store(start, errors):
    engine = start(policy="recompute")
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.fail_keys("get", lambda key: True, Result(Status.MISSING, code=-704))
    engine.ask("b", PROMPT)
    (line,) = errors
    assert re.fullmatch(LINE.format("get"), line).groups() == ("6", "6", "b", "'-704'")


def test_bc_012_five_thousand_failed_puts_are_one_short_line(start, errors):
    """No keys in it, and every code once."""
    engine = start()
    engine.store.fail_keys("put", lambda key: True, Result(Status.NO_SPACE, code=-200))
    blocks = range(5000)
    part = JobPart(0, list(blocks), [b"%032d" % i for i in blocks], [i % 64 for i in blocks])
    outcome = engine.ranks[0].worker_side._transfers.save(SaveJob(1, "a", [part], 60.0, "ns"))
    assert len(outcome.failed) == 5000
    (line,) = errors
    assert re.fullmatch(LINE.format("put"), line).groups() == ("5000", "5000", "a", "'-200'")
    assert len(line) < 200
