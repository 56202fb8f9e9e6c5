"""Aborts at every stage of a request's life."""

from __future__ import annotations

import pytest

from tests.contract.content import expected_output

PROMPT = list(range(100, 200))


def warmed(start, **fields):
    engine = start(**fields)
    engine.ask("a", PROMPT)
    engine.forget_local()
    return engine


def test_abort_while_waiting_with_a_lease(start):
    engine = warmed(start, max_seqs=1)
    engine.add("runs", [7] * 40, 30)
    engine.step()
    engine.add("waits", PROMPT)
    engine.step()
    engine.abort("waits")
    engine.run(["runs"])
    engine.assert_clean()


def test_abort_while_the_lookup_runs(start):
    engine = warmed(start, options={"lookup_wait_ms": 0})
    gate, asked = engine.store.close_gate("exists"), engine.store.calls["exists"]
    engine.add("b", PROMPT)
    engine.until(lambda: engine.store.calls["exists"] > asked, step=True)
    assert engine.pool._requests["b"].lookup is not None
    engine.abort("b")
    gate.set()
    engine.until(lambda: engine.store.calls["lease"] == 1)  # the lookup went on
    engine.assert_clean()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("groups", [(("full", 0),), (("full", 0), ("sliding", 24))], ids=["full", "hybrid"])
def test_bc_060_abort_during_an_async_load_leaks_nothing(start, policy, fails, groups):
    engine = warmed(start, load_async=True, policy=policy, groups=groups)
    engine.store.hold.add("get")
    free = engine.blocks.get_num_free_blocks()
    for i in range(50):
        engine.add(f"b{i}", PROMPT)
        engine.until(lambda: engine.store.held, step=True)
        engine.abort(f"b{i}")
        engine.step()
        assert engine.blocks.get_num_free_blocks() < free, "the blocks are still written to"
        if fails:
            engine.store.fail_keys("get", lambda key: True)
        engine.until(lambda: not engine.store.finish_held() and not engine.scheduler.requests, step=True)
        engine.store.rules.clear()
        engine.pool.negatives.clear()
        engine.settle()
        assert engine.blocks.get_num_free_blocks() == free
    engine.assert_clean()


def test_abort_between_the_end_of_a_load_and_the_next_step(start):
    engine = warmed(start, load_async=True)
    engine.add("b", PROMPT)
    engine.until(lambda: "b" in engine.scheduler.finished_recving_kv_req_ids, step=True)
    engine.abort("b")
    engine.assert_clean()


def test_abort_between_allocation_and_the_start_of_the_load(start):
    """The step that allocates also ships the job: an abort during that step finds the load under way."""
    engine = warmed(start, load_async=True)
    engine.add("b", PROMPT)
    engine.during.append(lambda: engine.abort("b"))
    engine.step()
    engine.assert_clean()


@pytest.mark.parametrize("when", ["before the load", "during the step"])
def test_abort_of_a_request_with_a_sync_load(start, when):
    engine = warmed(start)
    engine.add("b", PROMPT, 5)
    if when == "during the step":
        engine.during.append(lambda: engine.abort("b"))
        engine.step()
    else:
        engine.abort("b")
    assert engine.ask("c", PROMPT, 5) == expected_output(PROMPT, 5)
    engine.assert_clean()


def test_abort_while_running(start):
    engine = warmed(start)
    engine.add("b", PROMPT, 50)
    for _ in range(5):
        engine.step()
    assert engine.answers["b"].tokens
    engine.abort("b")
    engine.assert_clean()


@pytest.mark.parametrize("load_async", [False, True])
def test_abort_during_a_save_keeps_its_blocks_until_it_has_returned(start, load_async):
    engine = start(load_async=load_async)
    engine.store.hold.add("put")
    engine.add("a", PROMPT, 50)
    engine.until(lambda: engine.store.held, step=True)
    engine.abort("a")
    engine.step()
    assert engine.pool.open_counts()["pinned"] > 0
    used = engine.spec.num_blocks - 1 - engine.blocks.get_num_free_blocks()
    assert used == engine.pool.open_counts()["pinned"]
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.assert_clean()
    assert engine.store.objects


def test_bc_064_aborts_of_the_finished_and_the_unknown(start):
    engine = warmed(start)
    engine.ask("b", PROMPT)
    request = engine.requests["b"]
    for _ in range(2):
        engine.abort("b", "unknown")
        engine.pool.finished(request)
    engine.assert_clean()


def test_bc_064_a_late_report_of_a_job_that_is_closed_changes_nothing(start):
    from vllm.v1.outputs import KVConnectorOutput

    from kvpool.core.jobs import JobReport
    from kvpool.engine.messages import WorkerReport

    engine = warmed(start)
    engine.ask("b", PROMPT)
    engine.settle()
    late = WorkerReport({1: JobReport(1, failed=[(0, b"x")]), 99: JobReport(1)})
    engine.pool.update(KVConnectorOutput(kv_connector_worker_meta=late, failed_recving={"b"}, finished_recving={"b"}))
    engine.assert_clean()


def test_bc_056_the_end_of_a_preempted_request(start):
    engine = start()
    engine.add("a", PROMPT, 50)
    for _ in range(4):
        engine.step()
    engine.preempt("a")
    engine.abort("a")
    engine.assert_clean()
