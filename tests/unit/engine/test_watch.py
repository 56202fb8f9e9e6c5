"""The zero-hit alarm and the summary a minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.core.diagnosis import Diagnosis
from kvpool.engine import watch
from kvpool.engine.watch import Watch


class Scene:
    """A watch with a clock of its own; what it logs is kept."""

    def __init__(self, monkeypatch, alarm_after: int) -> None:
        self.now = 100.0
        self.warnings: list[str] = []
        self.infos: list[str] = []
        self.explained: list[tuple[int, int]] = []
        self.alarming = True
        self.tasks: list[Callable[[], None]] | None = None  # where a test runs them itself
        monkeypatch.setattr(watch.logger, "warning", lambda text, *words: self.warnings.append(text % words))
        monkeypatch.setattr(watch.logger, "info", lambda text, *words: self.infos.append(text % words))
        self.watch = Watch(alarm_after, self._explain, self._start, lambda: self.now)

    def _start(self, task: Callable[[], None]) -> None:
        task() if self.tasks is None else self.tasks.append(task)

    def _explain(self, lookups: int, unknown: int) -> Diagnosis:
        self.explained.append((lookups, unknown))
        return Diagnosis("because", self.alarming)


@pytest.fixture
def scene(monkeypatch):
    return lambda alarm_after=10: Scene(monkeypatch, alarm_after)


def test_one_warning_after_so_many_lookups_without_a_hit(scene):
    one = scene(10)
    for _ in range(9):
        one.watch.add({"lookups": 1, "misses/reason=absent": 1})
    assert one.warnings == []
    for _ in range(50):
        one.watch.add({"lookups": 1, "misses/reason=absent": 1})
    assert one.warnings == ["kvpool: no hit in 10 lookups: because"]
    assert one.explained == [(10, 0)]


def test_lookups_without_an_answer_are_handed_to_the_explanation(scene):
    one = scene(4)
    one.watch.add({"lookups": 2, "misses/reason=unknown": 1, "misses/reason=timeout": 1})
    one.watch.add({"lookups": 2, "misses/reason=absent": 2})
    assert one.explained == [(4, 2)]


def test_nobody_else_saves_is_told_once_and_no_warning(scene):
    one = scene(10)
    one.alarming = False
    for _ in range(35):
        one.watch.add({"lookups": 1, "misses/reason=absent": 1})
    assert one.warnings == []
    assert one.infos == ["kvpool: no hit in 10 lookups: because"]
    assert one.explained == [(10, 0), (20, 0), (30, 0)], "others may have come"


def test_the_warning_comes_when_others_have_come(scene):
    one = scene(10)
    one.alarming = False
    one.watch.add({"lookups": 10})
    one.alarming = True
    for _ in range(30):
        one.watch.add({"lookups": 1})
    assert one.warnings == ["kvpool: no hit in 20 lookups: because"]


def test_a_store_that_is_slow_to_explain_is_not_asked_twice_at_once(scene):
    one = scene(10)
    one.tasks = []
    for _ in range(50):
        one.watch.add({"lookups": 1})
    assert len(one.tasks) == 1
    one.tasks.pop()()
    assert len(one.warnings) == 1
    one.watch.add({"lookups": 50})
    assert one.tasks == []


def test_an_explanation_that_raises_is_asked_for_again(scene, monkeypatch):
    one = scene(10)
    monkeypatch.setattr(one.watch, "_explain", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.watch.add({"lookups": 10})
    monkeypatch.setattr(one.watch, "_explain", one._explain)
    one.watch.add({"lookups": 10})
    assert one.warnings == ["kvpool: no hit in 20 lookups: because"]


def test_a_hit_before_means_that_it_works(scene):
    one = scene(10)
    one.watch.add({"lookups": 9, "hits": 1})
    one.watch.add({"lookups": 500})
    assert one.warnings == []


def test_zero_is_off(scene):
    one = scene(0)
    one.watch.add({"lookups": 10_000})
    assert one.warnings == []


def test_a_summary_a_minute_where_there_was_something_to_do(scene):
    one = scene(0)
    one.watch.add({"lookups": 4, "hits": 1, "misses/reason=absent": 3, "queried_tokens": 1000, "hit_tokens": 250})
    one.watch.add({"saved_bytes": 2_000_000, "saved_blocks": 3, "save_failures/reason=no_space": 2, "gauge:pinned_blocks": 9})
    assert one.infos == []
    one.now += 60
    one.watch.add({"loaded_bytes": 1_500_000, "load_failures/reason=missing": 1, "load_failures/reason=fatal": 1})
    (line,) = one.infos
    for part in (
        "4 lookups, 1 with a hit, 3 without (absent 3)",
        "; 25.0 % of 1000 tokens",
        ", 1.5 MB",
        "(3 blocks",
        "2 loads (missing 1, fatal 1), 2 saves (no_space 2)",
    ):
        assert part in line
    one.now += 60
    one.watch.add({})
    assert len(one.infos) == 1, "nothing happened in this minute"
    one.now += 60
    one.watch.add({"lookups": 1})
    assert "1 lookups, 0 with a hit, 0 without; 0.0 %" in one.infos[1]
