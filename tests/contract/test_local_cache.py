"""A failed synchronous load leaves wrong KV in the engine's own prefix cache; vLLM expects the request to compute it again."""

from __future__ import annotations

import pytest

from tests.contract.content import expected_output

PROMPT = list(range(100, 200))
LONGER = PROMPT + list(range(300, 330))


def fail_a_load(start, how: str, policy: str, **fields):
    """Request b's load fails; before it can compute the blocks again it is aborted or preempted."""
    engine = start(policy=policy, **fields)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.fail_keys("get", lambda key: True)
    engine.add("b", LONGER, 3)
    if how == "aborted during the step":
        engine.during.append(lambda: engine.abort("b"))
    while not (engine.last is not None and engine.last.invalid_block_ids):
        engine.step()
    engine.store.rules.clear()
    if how == "aborted after the step":
        engine.abort("b")
    elif how == "preempted" and policy == "recompute":
        engine.until(lambda: engine.requests["b"] in engine.scheduler.running, step=True)
        engine.preempt("b")
    return engine


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["aborted during the step", "aborted after the step", "preempted"])
def test_bc_066_bc_079_what_a_failed_load_spoiled_is_not_hit_locally(start, how, policy):
    engine = fail_a_load(start, how, policy)
    assert engine.ask("c", LONGER, 3) == expected_output(LONGER, 3)
    engine.run()
    engine.assert_clean()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_requests_of_the_same_batch_that_share_the_bad_blocks_end_by_policy(start, policy):
    engine = start(max_tokens_per_step=256, policy=policy)
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.fail_keys("get", lambda key: True)
    for name in ("b", "c", "d"):
        engine.add(name, LONGER, 3)
    engine.run()
    assert [engine.answers[name].tokens for name in "bcd"] == [expected_output(LONGER, 3) if policy == "recompute" else []] * 3
    engine.assert_clean()
