"""The zero-hit alarm: a warning where others save and nothing hits, a word of information where the engine is alone."""

from __future__ import annotations

import json

import pytest

from kvpool.core.namespace import NamespaceInputs
from kvpool.engine import watch
from kvpool.engine.agreement import NOTES
from tests.contract import spec
from tests.contract.fakestore import FakeStore
from tests.contract.harness import Harness

AFTER = 5
OPTIONS = {"zero_hit_alarm_lookups": AFTER}


class NotedStore(FakeStore):
    """A store that keeps notes. ``broken``: it raises whenever it is asked about itself."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[bytes, str] = {}

    def write_note(self, name, text):
        self.noted[name] = text

    def notes(self, prefix):
        if self.broken:
            raise RuntimeError("no notes")
        return {name: text for name, text in self.noted.items() if name.startswith(prefix)}

    def stats(self):
        if self.broken:
            raise RuntimeError("no numbers")
        return super().stats()


@pytest.fixture
def told(monkeypatch) -> list[tuple[str, str]]:
    """The alarm's lines, each with its level."""
    lines: list[tuple[str, str]] = []

    def keep(level: str):
        return lambda text, *words: lines.append((level, text % words)) if "no hit in" in text else None

    for level in ("info", "warning"):
        monkeypatch.setattr(watch.logger, level, keep(level))
    return lines


def ask_unrelated(engine: Harness, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        engine.ask(f"r{i}", [i + 1] * 40)
        engine.settle()


def other_record(engine: Harness, **fields: str) -> dict[bytes, str]:
    """The note of an engine whose namespace differs in these fields."""
    inputs = json.loads(engine.pool._agreement.inputs.to_json()) | fields
    return {NOTES + NamespaceInputs(**inputs).digest.encode(): json.dumps(inputs)}


def test_an_engine_alone_in_a_pool_that_it_fell_into_is_no_warning_and_names_the_fallback(start, told, monkeypatch):
    monkeypatch.delitem(spec.OPTIONS, "backend")
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    engine = start(NotedStore(), options=OPTIONS)
    ask_unrelated(engine, 3 * AFTER)
    engine.until(lambda: told)
    ((level, line),) = told
    assert level == "info"
    assert f"no hit in {AFTER} lookups: the pool holds" in line
    for part in (
        "neither backend nor MOONCAKE_CONFIG_PATH is set",
        "address /dev/shm/kvpool-",
        "tenant default",
        "no engine of another namespace has left its record here",
    ):
        assert part in line


def test_a_namespace_of_others_is_one_warning(start, told):
    engine = start(NotedStore(), options=OPTIONS)
    ask_unrelated(engine, 1)
    engine.store.noted |= other_record(engine, kv_dtype="fp8")
    ask_unrelated(engine, 3 * AFTER, first=1)
    engine.until(lambda: told)
    ((level, line),) = told
    assert level == "warning"
    assert "kv_dtype: ours" in line


def test_objects_of_others_in_the_same_namespace_are_one_warning(start, told):
    """They leave the same record: what tells them is that the pool holds more than this engine can have saved."""
    engine = start(NotedStore(), options=OPTIONS)
    others = start(engine.store)
    engine.shares_store = others.shares_store = True
    ask_unrelated(others, 10, first=100)
    ask_unrelated(engine, AFTER + 1)
    engine.until(lambda: told)
    ((level, line),) = told
    assert level == "warning"
    assert "of this engine at most" in line


@pytest.mark.parametrize("tp", [1, 2])
def test_its_own_objects_are_never_taken_for_those_of_others(start, told, tp):
    engine = start(NotedStore(), options=OPTIONS, tp=tp)
    ask_unrelated(engine, 4 * AFTER)
    engine.until(lambda: told)
    assert len(engine.store.objects) > 4 * AFTER * tp
    assert [level for level, _ in told] == ["info"]


def test_an_engine_that_saves_nothing_is_warned_in_an_empty_pool(start, told):
    """Whatever it hits, others must have saved."""
    engine = start(NotedStore(), role="kv_consumer", options={**OPTIONS, "consumer_is_to_load": True})
    ask_unrelated(engine, AFTER + 1)
    engine.until(lambda: told)
    ((level, line),) = told
    assert level == "warning"
    assert "same store and tenant" in line


def test_a_store_that_fails_when_asked_does_not_silence_the_alarm(start, told):
    engine = start(NotedStore(), options={**OPTIONS, "breaker_failures": 1000})
    ask_unrelated(engine, 1)
    engine.store.broken = True
    engine.store.hooks["exists"] = lambda keys: 1 / 0
    ask_unrelated(engine, AFTER, first=1)
    engine.until(lambda: told)
    ((level, line),) = told
    assert level == "warning"
    assert f"{AFTER - 1} of {AFTER} lookups got no answer: is the store up? (backend local" in line
