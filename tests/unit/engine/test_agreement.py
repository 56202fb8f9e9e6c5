"""What all ranks, and all engines of one pool, are told when they do not use the same pool."""

from __future__ import annotations

import json

from tests.contract.fakestore import FakeStore
from tests.unit.core.test_core_namespace import BASE

from kvpool.engine import agreement
from kvpool.engine.agreement import STORE_NOTES, Agreement
from kvpool.engine.messages import RankInfo
from kvpool.options.record import StoreRecord

OURS = StoreRecord("mooncake", "10.0.0.1:50051", "a")


class Notes(FakeStore):
    def __init__(self, notes: dict[bytes, str]) -> None:
        super().__init__()
        self.kept = notes

    def notes(self, prefix: bytes) -> dict[bytes, str]:
        return {name: text for name, text in self.kept.items() if name.startswith(prefix)}


def agreed(store: StoreRecord, monkeypatch) -> tuple[Agreement, list[str]]:
    """An agreement of one rank, and the warnings so far."""
    said: list[str] = []
    monkeypatch.setattr(agreement.logger, "warning", lambda text, *values: said.append(text % values))
    found = Agreement(1, 1, lambda: "probe", "host", False, OURS)
    found.add(RankInfo(0, BASE, ((0, "h0-7_l0-3_c0_0", 64),), "host", store=store))
    assert found.settle()
    return found, said


def test_a_rank_that_uses_another_pool_is_named(monkeypatch):
    _, said = agreed(StoreRecord("mooncake", "10.0.0.2:50051", "a"), monkeypatch)
    assert said == [
        "kvpool: rank 0 uses another pool than the scheduler: the mooncake stores differ in endpoint "
        "(10.0.0.1:50051 here, 10.0.0.2:50051 there)"
    ]


def test_engines_leave_word_how_they_reach_the_pool(monkeypatch):
    found, said = agreed(OURS, monkeypatch)
    found._note(Notes({}))
    left = found.take_notes()
    assert [json.loads(text) for name, text in left.items() if name.startswith(STORE_NOTES)] == [
        ["mooncake", "10.0.0.1:50051", "a"]
    ]
    assert len(left) == 2, "that, and the inputs of the namespace"
    assert found.take_notes() == {}, "once"
    assert said == []
    found._note(Notes(left))
    assert said == [], "another engine that reaches it in the same way"


def test_another_engine_that_reaches_the_pool_otherwise_is_one_warning(monkeypatch):
    found, said = agreed(OURS, monkeypatch)
    theirs = json.dumps(["mooncake", "pool.example:50051", "a"])
    found._note(Notes({STORE_NOTES + b"0": theirs, STORE_NOTES + b"1": theirs}))
    assert len(said) == 1
    assert "another engine reaches this pool otherwise" in said[0]
    assert "pool.example:50051" in said[0]
