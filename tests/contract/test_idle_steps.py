"""A step that has nothing to compute while a load runs: it waits for the load a while, instead of being done over and over."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from kvpool.engine import matching, scheduler_side
from tests.contract.content import expected_output

PROMPT = list(range(100, 200))
LONG_S = 30.0


@pytest.fixture
def engine(start, monkeypatch):
    """One that has stored PROMPT and forgotten it, and would wait for very long."""
    monkeypatch.setattr(scheduler_side, "LOAD_PATIENCE_S", LONG_S)
    made = start(load_async=True)
    made.ask("a", PROMPT)
    made.forget_local()
    take = made.ranks[0].worker_side.take_finished_loads
    made.waits = []
    made.ranks[0].worker_side.take_finished_loads = lambda wait: made.waits.append(wait) or take(min(wait, 0.05))
    made.patient = take
    return made


def waits_of_a_load(engine) -> set[float]:
    """How long the steps during a load would wait for it."""
    gate = engine.store.close_gate("get")
    engine.add("b", PROMPT, 3)
    for _ in range(20):
        engine.step()
    waits = set(engine.waits)
    gate.set()
    engine.run()
    engine.assert_clean()
    return waits


def test_one_step_waits_for_the_load(engine):
    """And ends as soon as the load has."""
    engine.ranks[0].worker_side.take_finished_loads = engine.patient
    gate = engine.store.close_gate("get")
    engine.add("b", PROMPT, 3)
    threading.Timer(0.3, gate.set).start()
    began, before = time.monotonic(), engine.steps
    engine.run(["b"])
    assert time.monotonic() - began < LONG_S / 2
    assert engine.steps - before <= 6  # ask, load, three tokens; a step of its own when the answer of the lookup is late
    assert engine.answers["b"].tokens == expected_output(PROMPT, 3)
    assert engine.external["b"] == 96
    engine.assert_clean()


def test_a_step_that_computes_does_not_wait(engine):
    engine.add("other", [7] * 50, 40)
    engine.step()
    assert waits_of_a_load(engine) == {0.0}


def test_nor_does_one_while_a_lookup_is_under_way(engine):
    """Its answer would start the next load."""
    loading = engine.store.close_gate("get")
    engine.add("b", PROMPT, 3)
    engine.until(lambda: engine.step() and engine.store.calls["get"])
    engine.step()
    assert engine.waits[-1] == LONG_S
    looking = engine.store.close_gate("exists")
    engine.add("c", [9] * 50, 3)
    engine.step()
    engine.step()
    assert engine.waits[-2:] == [0.0, 0.0]
    looking.set()
    loading.set()
    engine.run()
    engine.assert_clean()


def test_without_a_load_nothing_is_waited_for(engine):
    """Saves end by themselves."""
    engine.ranks[0].worker_side.take_finished_loads = engine.patient
    gate = engine.store.close_gate("put")
    began = time.monotonic()
    engine.ask("b", [5] * 50, 3)
    for _ in range(3):
        engine.step()
    assert time.monotonic() - began < LONG_S / 2
    gate.set()
    engine.assert_clean()


def test_micro_batches_of_a_pipeline_do_not_wait_for_each_other(engine):
    engine.pool._setup = dataclasses.replace(engine.pool._setup, pipelined=True)
    assert waits_of_a_load(engine) == {0.0}


@pytest.mark.parametrize("wait_ms", [0, 2])
def test_a_lookup_may_take_longer_where_the_step_before_had_nothing_to_compute(start, monkeypatch, wait_ms):
    """Not where the operator wants no waits at all."""
    monkeypatch.setattr(matching, "IDLE_WAIT_S", LONG_S)
    engine = start(options={"lookup_wait_ms": wait_ms, "lookup_timeout_ms": 20_000})
    engine.ask("a", PROMPT)
    engine.forget_local()
    while engine.step():
        pass
    matcher = engine.pool._matcher
    matcher.new_step(idle=True)
    assert matcher._budget == (LONG_S if wait_ms else 0.0)
    gate = engine.store.close_gate("exists")
    engine.add("b", PROMPT, 3)
    threading.Timer(0.3, gate.set).start()
    engine.step()
    assert bool(engine.scheduler.running) == (wait_ms > 0)
    engine.run(["b"])
    engine.assert_clean()
