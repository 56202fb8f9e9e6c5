"""Inside a MultiConnector, before or behind another connector that loads for itself."""

from __future__ import annotations

import pytest

from tests.contract.content import expected_output
from tests.contract.rival import RivalConnector

PROMPT = list(range(100, 200))
orders = pytest.mark.parametrize("rival", ["first", "last"])
loads = pytest.mark.parametrize("load_async", [False, True])


@pytest.fixture
def offers(monkeypatch):
    """The rival claims this many tokens from now on, and fills their blocks rightly."""

    def set_offer(engine, tokens: int) -> None:
        monkeypatch.setattr(RivalConnector, "offer", tokens)
        monkeypatch.setattr(RivalConnector, "filler", staticmethod(lambda names: fill(engine, names)))

    return set_offer


def fill(engine, names) -> None:
    for name in names:
        states = engine.prefixes.of(engine.requests[name])
        tables = engine.scheduler.kv_cache_manager.get_block_ids(name)
        count = engine.requests[name].num_computed_tokens
        for rank in engine.ranks:
            for group, table in enumerate(tables):
                rank.write(group, table, 0, states[:count], engine.weights)


@orders
@loads
def test_it_works_whatever_the_order(start, rival, load_async):
    engine = start(rival=rival, load_async=load_async)
    engine.ask("a", PROMPT, 3)
    engine.forget_local()
    assert engine.ask("b", PROMPT, 3) == expected_output(PROMPT, 3)
    assert engine.external["b"] == 96
    engine.assert_clean()


@orders
@loads
def test_bc_179_requests_that_another_connector_loads(start, offers, rival, load_async):
    """The first that has something loads. We never report what we did not load, and our lease ends."""
    engine = start(rival=rival, load_async=load_async)
    engine.ask("a", PROMPT, 3)
    engine.forget_local()
    offers(engine, 64)
    gets = engine.store.calls["get"]
    reported = []
    for rank in engine.ranks:
        take = rank.worker_side.take_finished_loads
        rank.worker_side.take_finished_loads = lambda wait, take=take: reported.append(found := take(wait)) or found
    for i in range(5):
        assert engine.ask(f"b{i}", PROMPT, 3) == expected_output(PROMPT, 3)
        engine.forget_local()
    if rival == "first":
        assert engine.store.calls["get"] == gets
        assert not any(done for done, _ in reported)
    else:
        assert engine.store.calls["get"] > gets
    engine.assert_clean()


@orders
def test_bc_179_abort_while_another_connector_loads(start, offers, rival):
    engine = start(rival=rival)
    engine.ask("a", PROMPT)
    engine.forget_local()
    offers(engine, 32)
    for i in range(10):
        engine.add(f"b{i}", [*PROMPT[:40], i, *PROMPT], 3)
        if i % 3 == 0:
            engine.during.append(lambda name=f"b{i}": engine.abort(name))
        engine.step()
        if i % 3 == 1:
            engine.abort(f"b{i}")
    engine.run()
    engine.assert_clean()


@orders
def test_what_another_connector_has_loaded_is_saved_by_us(start, offers, rival):
    engine = start(rival=rival)
    offers(engine, 96)
    assert engine.ask("a", PROMPT + list(range(300, 350)), 2) == expected_output(PROMPT + list(range(300, 350)), 2)
    engine.assert_clean()
    assert len(engine.store.objects) >= 3, "at least what was computed here"


@orders
def test_ranks_introduce_themselves_where_the_handshake_is_anothers(start, monkeypatch, rival):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    monkeypatch.setattr(RivalConnector, "get_handshake_metadata", lambda self: KVConnectorHandshakeMetadata(), raising=False)
    engine = start(rival=rival, tp=2)
    engine.ask("a", PROMPT)
    engine.ask("a2", [t + 300 for t in PROMPT])
    engine.forget_local()
    engine.ask("b", [t + 300 for t in PROMPT], 3)
    assert engine.external["b"] == 96
    engine.assert_clean()


@orders
def test_the_summary_in_the_log_knows_what_the_workers_moved(start, rival):
    """vLLM packs the counters of several connectors into one."""
    engine = start(rival=rival)
    engine.ask("a", PROMPT, 3)
    engine.settle()
    assert engine.pool._watch._window["saves"] >= 1
    assert sum(v for k, v in engine.pool._watch._window.items() if k.startswith("saved_bytes")) > 0
