"""Every check passes with a good engine and fails with one that has the vice it is there for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.unit.acceptance.stand_in import BLOCK, Prefix, StandIn, serving

from kvpool.ops.acceptance import asking as asking_module
from kvpool.ops.acceptance import client as client_module
from kvpool.ops.acceptance import exactness, faults
from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import Book, Task, Wrong
from kvpool.ops.acceptance.client import Client, Silent
from kvpool.ops.acceptance.expected import FAULTY, Expected, ask_reference
from kvpool.ops.acceptance.report import PARTS


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "SETTLED_S", 0.0)
    monkeypatch.setattr(client_module, "SETTLE_S", 0.2)
    monkeypatch.setattr(client_module, "EMPTY_S", 0.3)
    monkeypatch.setattr(faults, "SEEN_S", 0.3)


@pytest.fixture(scope="module")
def expected() -> Expected:
    with serving(StandIn(None)) as client:
        return ask_reference(client)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _outcomes(tasks: list[Task]) -> dict[str, str]:
    book = Book(60, PARTS, lambda line: None)
    book.run("exactness", tasks)
    return {check.name.partition(" (")[0]: f"{check.status}: {check.reason}" for check in book.checks}


def _failed(outcomes: dict[str, str]) -> set[str]:
    return {name for name, text in outcomes.items() if not text.startswith("passed")}


def _first(stack: ExitStack, expected: Expected, *vices: str) -> dict[str, str]:
    client = stack.enter_context(serving(StandIn(set(), *vices)))
    return _outcomes(exactness.first_engine(Asking(client, expected), "sync"))


COLD, AGAIN, ALIKE = "cold", "asked again, hit on the device", "another prompt with the same beginning"
RESET, SALT = "hit in the pool after the engine's cache was emptied", "another cache_salt does not hit"
RESTART, BEGINNING = "hit in the pool after a restart", "a new prompt with a stored beginning"


@pytest.mark.parametrize(
    ("vices", "failing"),
    [
        ((), set()),
        (("wrong-always",), {COLD, AGAIN, ALIKE, RESET, SALT}),
        (("wrong-on-hit",), {RESET}),
        (("no-hits",), {RESET}),
        (("stores-nothing",), {RESET}),
        (("ignores-salt",), {SALT}),
        (("busy",), {RESET}),
        (("refuses",), {COLD, AGAIN, ALIKE, RESET, SALT}),
    ],
    ids=lambda value: "-".join(value) or "good" if isinstance(value, tuple) else "",
)
def test_first_engine(vices: tuple[str, ...], failing: set[str], stack: ExitStack, expected: Expected) -> None:
    outcomes = _first(stack, expected, *vices)
    assert set(outcomes) == {COLD, AGAIN, ALIKE, RESET, SALT}
    assert _failed(outcomes) == failing, outcomes


def test_an_engine_that_lost_its_own_cache_is_seen(stack: ExitStack, expected: Expected) -> None:
    outcomes = _first(stack, expected, "forgets", "stores-nothing")
    assert outcomes[AGAIN] == "failed: the answer is right, but the engine had 0 tokens of the prompt; without the pool it has 640"


def test_a_pool_that_is_not_new_is_seen(stack: ExitStack, expected: Expected) -> None:
    pool: set[Prefix] = {("", *expected.prompts["first"][:BLOCK])}
    client = stack.enter_context(serving(StandIn(pool)))
    outcomes = _outcomes(exactness.first_engine(Asking(client, expected), "sync"))
    assert outcomes[COLD] == f"failed: the pool was new and supplied {BLOCK} tokens"


@pytest.mark.parametrize(
    ("vices", "failing"),
    [
        ((), set()),
        (("no-hits",), {RESTART, BEGINNING, RESET}),
        (("wrong-on-hit",), {RESTART, BEGINNING, RESET}),
        (("ignores-salt",), {SALT}),
    ],
    ids=lambda value: "-".join(value) or "good" if isinstance(value, tuple) else "",
)
def test_second_engine(vices: tuple[str, ...], failing: set[str], stack: ExitStack, expected: Expected) -> None:
    pool: set[Prefix] = set()
    first = stack.enter_context(serving(StandIn(pool)))
    for name in ("first", "partial"):
        Asking(first, expected).right(name)
    second = stack.enter_context(serving(StandIn(pool, *vices)))
    outcomes = _outcomes(exactness.second_engine(Asking(second, expected), "async"))
    assert set(outcomes) == {RESTART, BEGINNING, RESET, SALT}
    assert _failed(outcomes) == failing, outcomes


def test_a_hit_may_come_late_where_that_is_allowed_but_never_with_wrong_tokens(stack: ExitStack, expected: Expected) -> None:
    engine = StandIn(set(), "no-hits")
    client = stack.enter_context(serving(engine))
    asking = Asking(client, expected, tries=3)
    asking.right("first")
    asked = 0

    def answer(prompt: list[int], count: int, salt: str) -> tuple[list[int], int]:
        nonlocal asked
        asked += 1
        if asked == 3:
            engine.vices.clear()
        return StandIn.answer(engine, prompt, count, salt)

    engine.answer = answer  # type: ignore[method-assign]
    assert asking.hit("first") == "640 of 730 tokens from the pool"
    assert asked == 3
    engine.vices.add("wrong-always")
    asked = 10
    with pytest.raises(Wrong, match="wrong answer: token 16 of 16"):
        asking.hit("first")
    assert asked == 11


def test_an_engine_that_hangs_fails_within_the_deadline(stack: ExitStack, expected: Expected) -> None:
    client = stack.enter_context(serving(StandIn(set(), "hangs"), answer_s=0.3))
    began = time.monotonic()
    with pytest.raises(Silent, match="no answer within 0 s"):
        Asking(client, expected).right("first")
    assert time.monotonic() - began < 20


def test_the_end_of_the_run_is_the_end_of_every_wait(stack: ExitStack, expected: Expected) -> None:
    client = stack.enter_context(serving(StandIn(set(), "hangs"), answer_s=30, left_s=0.3))
    began = time.monotonic()
    with pytest.raises(Silent):
        Asking(client, expected).right("first")
    assert time.monotonic() - began < 20
    over = Client("m", lambda most: 0.0, client.url)
    with pytest.raises(Silent, match="the time was over"):
        over.ask([1])


def test_answers_that_are_all_alike_prove_nothing(stack: ExitStack) -> None:
    engine = StandIn(None)
    engine.answer = lambda prompt, count, salt: ([7] * count, 0)  # type: ignore[method-assign]
    client = stack.enter_context(serving(engine))
    with pytest.raises(Wrong, match="1 different answers to"):
        ask_reference(client)


def test_either_split_is_right_and_anything_else_is_not(expected: Expected) -> None:
    two = Expected({"first": ((1, 2, 3), (1, 2, 4))}, {})
    assert two.split_matters == 1
    answer = client_module.Answer
    for tokens in ((1, 2, 3), (1, 2, 4)):
        two.judge("first", answer(tokens, 0, 0.1))
    with pytest.raises(Wrong, match=r"^wrong answer: token 2 of 3 is not what the engine without the pool says$"):
        two.judge("first", answer((1, 9, 3), 0, 0.1))
    with pytest.raises(Wrong, match="token 3 of 2"):
        two.judge("first", answer((1, 2), 0, 0.1))
    assert expected.split_matters == 0


CONTROL, WELL = "control: flipped bits in what a get brings are seen as wrong tokens", "hits again after the faults"


@pytest.mark.parametrize(
    ("vices", "failing"),
    [
        ((), set()),
        (("blind-to-faults",), {fault.name for fault in faults.FAULTS} | {CONTROL}),
        (("wrong-always",), {fault.name for fault in faults.FAULTS} | {WELL, CONTROL}),
        (("no-hits",), {fault.name for fault in faults.FAULTS if "get" in fault.calls} | {WELL, CONTROL}),
    ],
    ids=lambda value: "-".join(value) or "good" if isinstance(value, tuple) else "",
)
def test_faults(vices: tuple[str, ...], failing: set[str], stack: ExitStack, expected: Expected, tmp_path: Path) -> None:
    plan = faults.Plan(tmp_path / "faults.json")
    client = stack.enter_context(serving(StandIn(set(), *vices, plan=plan.path)))
    outcomes = _outcomes(faults.tasks(Asking(client, expected), plan, FAULTY))
    assert set(outcomes) == {fault.name for fault in faults.FAULTS} | {WELL, CONTROL}
    assert _failed(outcomes) == failing, outcomes
    assert plan.path.read_text() == '{"calls": {}}'


def test_an_answer_that_takes_too_long_under_a_fault_fails(
    stack: ExitStack, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_module, "LATE_S", 0.001)
    plan = faults.Plan(tmp_path / "faults.json")
    client = stack.enter_context(serving(StandIn(set(), plan=plan.path)))
    outcomes = _outcomes(faults.tasks(Asking(client, expected), plan, FAULTY)[:1])
    assert "failed: right, but only after" in outcomes["every get fails"]
