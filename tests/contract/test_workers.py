"""The worker side alone: draft layers, devices and threads, sleep, shutdown, reports and gauges."""

from __future__ import annotations

import threading
import time

import pytest

from kvpool.engine.stats import PoolStats
from kvpool.engine.threads import WorkerThreads
from tests.contract.content import expected_output
from tests.contract.fakestore import FakeStore
from tests.contract.harness import Harness
from tests.contract.spec import Spec

PROMPT = list(range(100, 200))


@pytest.mark.parametrize("shape", [{"layers": 4}, {"layers": 4, "pp": 2}, {"layers": 4, "tp": 2}])
def test_bc_035_bc_041_the_draft_layer_is_stored_and_loaded_like_any_other(start, shape):
    """With pipeline stages it is on the last one only; every stage stores and loads what it has."""
    engine = start(draft_layers=1, **shape)
    engine.ask("a", PROMPT, 3)
    engine.forget_local()
    spans = {key.split(b":")[3].decode().split("_")[1] for key in engine.store.objects}
    assert spans == ({"l0-1", "l2-2", "l3-3"} if "pp" in shape else {"l0-2", "l3-3"})
    for rank in engine.ranks:
        rank.memory[:] = -1
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["b"] == 96
    engine.assert_clean()


def test_bc_035_without_the_draft_layer_there_is_no_hit(start):
    engine = start(layers=3, draft_layers=1)
    engine.ask("a", PROMPT)
    engine.forget_local()
    for key in [key for key in engine.store.objects if b"l2-2" in key]:
        del engine.store.objects[key]
    engine.ask("b", PROMPT)
    assert engine.external["b"] == 0
    engine.assert_clean()


def test_bc_035_engines_with_and_without_a_drafter_share_the_target_layers(start):
    store = FakeStore()
    plain, drafting = start(store, layers=2), start(store, layers=3, draft_layers=1)
    drafting.ask("a", PROMPT)
    drafting.settle()
    plain.shares_store = True
    assert plain.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert plain.external["b"] == 96


def test_bc_034_bc_040_a_group_split_by_a_drafter_keeps_the_blocks_of_its_group(start):
    """Layers of one KV-cache group are two objects a block, target and draft; both use that group's block ids, each moved once."""
    engine = start(groups=(("full", 0), ("sliding", 24)), layers=2, draft_layers=1, drafts=2)
    engine.ask("a", PROMPT, 3)
    engine.forget_local()
    names = [key.decode().split(":")[2:4] for key in engine.store.objects]
    assert {(group, shard.split("_")[1]) for group, shard in names} == {("0", "l0-2s2"), ("1", "l1-1"), ("1", "l3-3")}
    moved = []
    get = engine.store.get
    engine.store.get = lambda batch, deadline_s: moved.extend(batch.keys) or get(batch, deadline_s)
    for rank in engine.ranks:
        rank.memory[:] = -1
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["b"] == 96
    assert len(moved) == len(set(moved)) > 0
    engine.assert_clean()


def test_bc_107_every_thread_is_bound_to_its_device_first():
    order = []
    threads = WorkerThreads("test", 3, lambda: order.append(("bound", threading.get_ident())))
    tickets = [threads.submit(lambda: order.append(("task", threading.get_ident())) or time.sleep(0.01)) for _ in range(20)]
    assert all(ticket.wait(30) for ticket in tickets)
    assert threads.close(30)
    for ident in {i for _, i in order}:
        assert next(what for what, i in order if i == ident) == "bound"
        assert [what for what, i in order if i == ident].count("bound") == 1


def test_a_task_that_raises_fails_alone():
    threads = WorkerThreads("test", 1)
    bad, good = threads.submit(lambda: 1 / 0), threads.submit(lambda: 7)
    assert good.wait(30)
    assert (type(bad.error), good.value) == (ZeroDivisionError, 7)
    assert threads.close(30)


def test_a_callback_that_raises_does_not_kill_the_thread():
    threads = WorkerThreads("test", 1)
    gate = threading.Event()
    first = threads.submit(lambda: gate.wait(30))
    first.then(lambda ticket: 1 / 0)
    gate.set()
    assert threads.submit(lambda: 7).wait(30)
    assert threads.close(30)


def test_bc_061_shutdown_ends_although_a_call_never_returns(start):
    engine = Harness(Spec(load_async=True))
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.close_gate("get")
    engine.add("b", PROMPT)
    engine.until(lambda: engine.store.calls["get"], step=True)
    began = time.monotonic()
    engine.ranks[0].connector.shutdown()
    engine.ranks[0].connector.shutdown()
    engine.scheduler.connector.shutdown()
    assert time.monotonic() - began < 30
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("kvpool"))
    engine.close()


def test_nothing_touches_kv_memory_while_the_engine_sleeps(start):
    engine = start(load_async=True)
    engine.ask("a", PROMPT)
    engine.forget_local()
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.unregister_kv_caches()
    gets, puts = engine.store.calls["get"], engine.store.calls["put"]
    engine.add("b", PROMPT)
    engine.add("c", [t + 300 for t in PROMPT])
    engine.run()
    engine.settle()
    assert (engine.store.calls["get"], engine.store.calls["put"]) == (gets, puts)
    for rank in engine.ranks:
        rank.connector.restore_kv_caches()
    engine.pool.negatives.clear()
    engine.forget_local()
    engine.ask("d", PROMPT)
    assert engine.external["d"] == 96
    engine.assert_clean()


def test_sleep_waits_for_what_runs_and_says_when_it_cannot(start):
    engine = start(FakeStore(abandonable=False), load_async=True, options={"load_timeout_ms": 200})
    engine.ask("a", PROMPT)
    engine.forget_local()
    engine.store.hold.add("get")
    engine.add("b", PROMPT)
    engine.until(lambda: engine.store.held, step=True)
    with pytest.raises(TimeoutError):
        engine.ranks[0].connector.unregister_kv_caches()
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.ranks[0].connector.unregister_kv_caches()
    engine.ranks[0].connector.restore_kv_caches()
    engine.run()
    engine.assert_clean()


def test_bc_116_gauges_are_the_latest_and_never_negative():
    one, other = PoolStats(), PoolStats()
    one.gauge("pinned_blocks", 4)
    one.add("saves", 2)
    other.gauge("pinned_blocks", 0)
    other.add("saves", 3)
    merged = one.aggregate(other)
    assert merged.data["saves"] == 5
    assert merged.data["gauge:pinned_blocks"] >= 0


def test_bc_116_the_gauge_of_pinned_blocks_goes_back_to_zero(start):
    engine = start()
    engine.store.hold.add("put")
    engine.ask("a", PROMPT)
    assert engine.pool._pins.total > 0
    engine.store.hold.clear()
    engine.store.finish_held()
    engine.settle()
    assert (engine.pool._pins.total, engine.pool._pins.saving) == (0, 0)
    engine.assert_clean()


@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"load_async": True}])
def test_every_job_is_reported_once_by_every_rank(start, shape):
    engine = start(**shape)
    ended: dict[int, int] = {}
    for rank in engine.ranks:
        take = rank.worker_side.take_report

        def watched(take=take):
            report = take()
            for job_id, one in report.jobs.items() if report is not None else ():
                ended[job_id] = ended.get(job_id, 0) + one.ranks
            return report

        rank.worker_side.take_report = watched
    for i in range(12):
        engine.add(f"r{i}", [*PROMPT[: 20 + 16 * (i % 3)], i % 4, *PROMPT], 3)
    engine.run()
    engine.assert_clean()
    assert ended
    assert set(ended.values()) == {engine.spec.ranks}


def test_bc_047_the_heads_are_those_of_the_text_model(start):
    """The configuration's own number of KV heads is what counts, however few the pages of one rank show."""
    engine = start(heads=4, tp=2)
    engine.ask("a", PROMPT[:33])
    engine.assert_clean()
    assert {key.split(b":")[3] for key in engine.store.objects} == {b"h0-1_l0-1_c0_0", b"h2-3_l0-1_c0_0"}


def test_ranks_that_disagree_are_refused_by_the_name_of_the_field(start):
    from dataclasses import replace

    engine = start(tp=2)
    infos = [rank.worker_side.info for rank in engine.ranks]
    agreement = type(engine.pool._agreement)(2, 1, lambda: "probe", infos[0].host, False)
    agreement.add(infos[0])
    with pytest.raises(RuntimeError, match="disagrees on kv_dtype"):
        agreement.add(replace(infos[1], inputs=replace(infos[1].inputs, kv_dtype="fp8")))


def test_a_host_bound_store_refuses_ranks_of_another_host(start):
    from dataclasses import replace

    engine = start()
    info = engine.ranks[0].worker_side.info
    agreement = type(engine.pool._agreement)(1, 1, lambda: "probe", info.host, True)
    with pytest.raises(RuntimeError, match="one host"):
        agreement.add(replace(info, host="elsewhere"))
