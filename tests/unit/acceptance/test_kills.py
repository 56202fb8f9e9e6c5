"""The kill list with engines that are none: what must pass passes, and harm done to the others is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.acceptance.stand_in import Prefix, StandIn, serving

from kvpool.ops.acceptance import asking as asking_module
from kvpool.ops.acceptance import client as client_module
from kvpool.ops.acceptance import kills
from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import Book
from kvpool.ops.acceptance.engines import POOL
from kvpool.ops.acceptance.expected import Expected, ask_reference
from kvpool.ops.acceptance.report import PARTS
from kvpool.stores import make_local_store

Harm = Callable[["StandIns"], None]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "SETTLED_S", 0.0)
    monkeypatch.setattr(client_module, "SETTLE_S", 0.2)
    monkeypatch.setattr(client_module, "EMPTY_S", 0.3)
    monkeypatch.setattr(kills, "SAVING_S", 30.0)
    monkeypatch.setattr(kills, "RECOVERED_S", 0.5)


@pytest.fixture(scope="module")
def expected() -> Expected:
    with serving(StandIn(None)) as client:
        return ask_reference(client)


class StandIns:
    """In the place of ``Engines``; ``harm`` is done to the others when an engine, or the store, is harmed."""

    def __init__(self, stack: ExitStack, root: Path, service: bool, **harm: Harm) -> None:
        self.root, self.service, self.harm = root, service, harm
        self.pool: set[Prefix] = set()
        self.engines = {name: StandIn(self.pool) for name in ("kept", "victim", "anew")}
        self.handles = {
            name: SimpleNamespace(name=name, client=stack.enter_context(serving(engine))) for name, engine in self.engines.items()
        }
        self.done: list[str] = []

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.harm:
            self.harm[what](self)

    def stop(self, engine: Any) -> None:
        self._do("stop")

    def go_on(self, engine: Any) -> None:
        self._do("go_on")

    def kill(self, engine: Any) -> None:
        self.engines[engine.name].device.clear()
        self._do("kill")

    def start(self, engine: Any) -> str:
        self._do(f"start_{engine.name}")
        return ""

    def end(self, engine: Any) -> None:
        self._do("end")

    def stop_service(self) -> None:
        self._do("stop_service")

    def service_goes_on(self) -> None:
        self._do("service_goes_on")

    def kill_service(self) -> None:
        self._do("kill_service")

    def start_service_anew(self) -> None:
        self.pool.clear()
        self._do("start_service_anew")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _run(engines: StandIns, expected: Expected) -> dict[str, str]:
    scene = kills.Scene(
        engines,  # type: ignore[arg-type]
        *(engines.handles[name] for name in ("kept", "victim", "anew")),  # type: ignore[arg-type]
        lambda engine: Asking(engine.client, expected),
    )
    book = Book(600, PARTS, lambda line: None)
    book.run(kills.PART, kills.tasks(scene))
    return {check.name: f"{check.status}: {check.reason}" for check in book.checks}


def _vice(name: str, vice: str) -> Harm:
    return lambda engines: engines.engines[name].vices.add(vice)


def _virtue(name: str, vice: str) -> Harm:
    return lambda engines: engines.engines[name].vices.discard(vice)


SHARED = "an engine hits what another one beside it has stored"
STOPPED = "an engine stopped (SIGSTOP) in the middle of saves"
KILLED = "an engine killed (kill -9) in the middle of saves"
VERIFIED = "after that every slot of the pool is accounted for"
RESTARTED = "the killed engine started again"
SERVICE_STOPPED = "the store's service stopped (SIGSTOP), then going on"
SERVICE_KILLED = "the store's service killed (kill -9)"
REMOVED = "the pool's directory removed while engines use it"
ANEW = "a new engine with a new pool"


def _local_pool(root: Path) -> None:
    pool = make_local_store(root=root, name=POOL, dram_bytes=8 << 20)
    pool.open()
    pool.close()


def test_local(stack: ExitStack, expected: Expected, pool_root: Path) -> None:
    _local_pool(pool_root)
    engines = StandIns(stack, pool_root, service=False)
    outcomes = _run(engines, expected)
    assert list(outcomes) == [SHARED, STOPPED, KILLED, VERIFIED, RESTARTED, REMOVED, ANEW]
    assert all(text.startswith("passed") for text in outcomes.values()), outcomes
    assert not (pool_root / POOL).exists()
    assert engines.done == ["stop", "go_on", "kill", "start_victim", "end", "end", "start_anew"]


def test_service(stack: ExitStack, expected: Expected, tmp_path: Path) -> None:
    engines = StandIns(stack, tmp_path, service=True)
    outcomes = _run(engines, expected)
    assert list(outcomes) == [SHARED, STOPPED, KILLED, RESTARTED, SERVICE_STOPPED, SERVICE_KILLED, ANEW]
    assert all(text.startswith("passed") for text in outcomes.values()), outcomes
    assert engines.done[-4:] == ["end", "end", "start_service_anew", "start_anew"]


@pytest.mark.parametrize(
    ("harm", "failing", "reason"),
    [
        ({"stop": _vice("kept", "wrong-always"), "go_on": _virtue("kept", "wrong-always")}, STOPPED, "wrong answer"),
        ({"stop": _vice("kept", "no-hits"), "go_on": _virtue("kept", "no-hits")}, STOPPED, "the pool supplied 0 tokens"),
        ({"go_on": _vice("victim", "wrong-always"), "kill": _virtue("victim", "wrong-always")}, STOPPED, "wrong answer"),
        ({"kill": _vice("kept", "wrong-always"), "start_victim": _virtue("kept", "wrong-always")}, KILLED, "wrong answer"),
        ({"kill": _vice("kept", "no-hits"), "start_victim": _virtue("kept", "no-hits")}, KILLED, "the pool supplied 0 tokens"),
        (
            {"start_victim": _vice("victim", "wrong-on-hit"), "stop_service": _virtue("victim", "wrong-on-hit")},
            RESTARTED,
            "wrong answer",
        ),
        ({"start_victim": lambda engines: engines.pool.clear()}, RESTARTED, "the pool supplied 0 tokens"),
        (
            {"stop_service": _vice("kept", "refuses"), "service_goes_on": _virtue("kept", "refuses")},
            SERVICE_STOPPED,
            "answered 500",
        ),
        (
            {"service_goes_on": _vice("kept", "no-hits"), "kill_service": _virtue("kept", "no-hits")},
            SERVICE_STOPPED,
            "the pool supplied 0 tokens",
        ),
        ({"kill_service": _vice("kept", "wrong-always")}, SERVICE_KILLED, "wrong answer"),
        ({"start_anew": _vice("anew", "stores-nothing")}, ANEW, "the pool supplied 0 tokens"),
    ],
)
def test_harm_is_seen(
    harm: dict[str, Harm], failing: str, reason: str, stack: ExitStack, expected: Expected, tmp_path: Path
) -> None:
    outcomes = _run(StandIns(stack, tmp_path, service=True, **harm), expected)
    assert [name for name, text in outcomes.items() if not text.startswith("passed")] == [failing], outcomes
    assert reason in outcomes[failing]


def test_an_engine_that_stores_nothing_cannot_be_killed_in_the_middle_of_saves(
    stack: ExitStack, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "SAVING_S", 0.5)
    engines = StandIns(stack, tmp_path, service=True)
    engines.engines["victim"].vices.add("stores-nothing")
    outcomes = _run(engines, expected)
    assert outcomes[KILLED] == "failed: the engine stores nothing of what it computes"


def test_a_pool_with_lost_slots_is_seen(
    stack: ExitStack, expected: Expected, pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.stores.local import LocalStore

    _local_pool(pool_root)
    monkeypatch.setattr(LocalStore, "verify", lambda self: ["slot 3 belongs to nobody", "slot 4 too"])
    outcomes = _run(StandIns(stack, pool_root, service=False), expected)
    assert outcomes[VERIFIED] == "failed: 2 findings, the first: slot 3 belongs to nobody"
