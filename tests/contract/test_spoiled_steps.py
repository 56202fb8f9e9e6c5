"""A step that computed on top of a failed load stores nothing, on any rank."""

from __future__ import annotations

import pytest

from kvpool.core.jobs import SaveJob
from kvpool.engine.held import HeldSaves
from tests.contract.content import expected_output
from tests.contract.harness import OracleError

PROMPT = list(range(100, 200))
LONGER = PROMPT + list(range(300, 350))


def _fail_on_one_rank(start):
    engine = start(tp=2, policy="fail")
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.fail_keys("get", lambda key: b":h0-" in key)
    return engine


def test_what_one_rank_failed_to_load_spoils_no_shard_of_any(start):
    engine = _fail_on_one_rank(start)
    engine.ask("b", LONGER, 4)
    assert "ERROR" in engine.answers["b"].reason.upper()
    engine.settle()
    engine.check_store()
    engine.store.fail_keys("get", lambda key: False)
    engine.forget_local()
    engine.pool.negatives.clear()
    assert engine.ask("c", LONGER, 4) == expected_output(LONGER, 4)
    assert engine.assert_clean() is None


def test_control_without_holding_saves_the_other_rank_stores_garbage(start, monkeypatch):
    monkeypatch.setattr(HeldSaves, "hold", lambda self, job: self._waiting.append((job, set())))
    engine = _fail_on_one_rank(start)
    puts = engine.store.calls["put"]
    engine.during.append(lambda: engine.until(lambda: engine.store.calls["put"] > puts))
    engine.ask("b", LONGER)
    engine.settle()
    with pytest.raises(OracleError, match="wrong KV under"):
        engine.check_store()


def test_held_saves_go_out_when_their_steps_have_ended_well():
    held = HeldSaves(world_size=2)
    first, second, third, fourth = (SaveJob(i, "r", [], 1.0, "n") for i in (1, 2, 3, 4))
    held.hold(first)
    assert held.take_ready() == [first]
    one = held.open_step()
    held.hold(second)
    two = held.open_step()
    held.hold(third)
    assert held.step_ended({one: 1}, bad=False) == []
    assert held.take_ready() == [], "one rank of two has run the step"
    assert held.step_ended({one: 1}, bad=False) == []
    assert held.take_ready() == [second], "the third also waits for the second step"
    held.hold(fourth)
    assert held.step_ended({two: 2}, bad=True) == [third, fourth]
    assert held.take_ready() == []
    assert len(held) == 0
