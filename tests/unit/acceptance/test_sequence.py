"""A whole run with engines that are none: everything is entered, in order, and what was not asked for or did not fit is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.acceptance.stand_in import Prefix, StandIn, serving

from kvpool.ops import acceptance
from kvpool.ops.acceptance import asking, client, exactness, faults, kills, sequence
from kvpool.ops.acceptance.engines import POOL
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.acceptance.report import PARTS
from kvpool.ops.launch import Place
from kvpool.stores import make_local_store

Left = Callable[[float], float]


class Engines:
    """In the place of the real ones; ``vices`` by the engine's name."""

    stack: ExitStack
    root: Path
    service = False
    vices: dict[str, tuple[str, ...]]
    started: list[str]

    def __init__(self, options: AcceptanceOptions, model: str, launch: None, place: Place, left: Left) -> None:
        self.pool: set[Prefix] = set()
        self.left, self.running = left, set[str]()

    def engine(self, name: str, pool: dict[str, Any] | None, policy: str = "recompute") -> Any:
        plan = Path(pool["fault_plan_path"]) if pool and "fault_plan_path" in pool else None
        engine = StandIn(None if pool is None else self.pool, *self.vices.get(name, ()), plan=plan)
        made = self.stack.enter_context(serving(engine))
        return SimpleNamespace(name=name, client=client.Client("m", self.left, made.url, 10.0), engine=engine, policy=policy)

    def start(self, engine: Any) -> str:
        if engine.name not in self.running:
            if "never-starts" in engine.engine.vices:
                raise OSError(f"{engine.name}: no answer within 240 s\n--- end of its log")
            engine.engine.device.clear()
            self.running.add(engine.name)
            self.started.append(engine.name)
        return "answers"

    def end(self, engine: Any) -> None:
        self.running.discard(engine.name)

    kill = end

    def stop(self, engine: Any) -> None:
        pass

    go_on = stop


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, pool_root: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(asking, "SETTLED_S", 0.0)
    monkeypatch.setattr(client, "SETTLE_S", 0.2)
    monkeypatch.setattr(faults, "SEEN_S", 0.3)
    pool = make_local_store(root=pool_root, name=POOL, dram_bytes=8 << 20)
    pool.open()
    pool.close()
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}')

    @contextmanager
    def launched(options: Any, say: Any, deadline_s: float, logs: Path, plan: Any) -> Iterator[tuple[Any, None]]:
        made = plan(options, Place("", str(pool_root), {}, "", ""))
        assert made.processes == ()
        assert made.service is None
        yield made, None

    with ExitStack() as stack:
        Engines.stack, Engines.root, Engines.vices, Engines.started = stack, pool_root, {}, []
        monkeypatch.setattr(sequence, "launched", launched)
        monkeypatch.setattr(sequence, "Engines", Engines)

        def start(**more: Any) -> acceptance.Report:
            given = {"parts": PARTS[1:], **more}
            return acceptance.run(AcceptanceOptions("cpu", "local", str(tmp_path), **given), lambda line: None)

        yield start


def _by_status(report: acceptance.Report, part: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for check in report.checks:
        if check.part == part:
            found.setdefault(check.status, []).append(check.name)
    return found


def test_a_good_pool_passes_all(run: Callable[..., acceptance.Report]) -> None:
    report = run()
    assert {check.name: check.reason for check in report.checks if check.status != "passed"} == {
        "the suite": "not asked for (--only)"
    }
    assert report.exit_code == 0
    assert Engines.started == ["reference", "first", "second", "third", "second", "fourth"]
    assert [len(_by_status(report, part)["passed"]) for part in PARTS[1:]] == [11, 9, 8]
    assert report.facts["arithmetic of the engine without the pool"] == "does not depend on how prompts are split"
    assert report.facts["model"] == "LlamaForCausalLM, 2 layers"


def test_conformance_alone(run: Callable[..., acceptance.Report]) -> None:
    report = run(parts=("conformance",))
    assert report.exit_code == 0
    assert len(_by_status(report, "conformance")["passed"]) == 35
    assert Engines.started == []
    assert {check.name for check in report.checks if check.status == "not run"} == {"all checks"}


def test_one_part_starts_the_engines_that_it_needs(run: Callable[..., acceptance.Report]) -> None:
    report = run(parts=("kill list",))
    assert report.exit_code == 0
    assert Engines.started == ["reference", "second", "third", "second", "fourth"]
    assert set(_by_status(report, "exactness")) == {"not run"}


def test_wrong_tokens_of_one_engine_fail_the_run(run: Callable[..., acceptance.Report]) -> None:
    Engines.vices = {"second": ("wrong-on-hit",)}
    report = run(parts=("exactness",))
    assert report.exit_code == 1
    assert all(check.part == exactness.PART for check in report.checks if check.status == "failed")
    assert len(_by_status(report, "exactness")["failed"]) == 3


def test_an_engine_that_does_not_start_leaves_its_checks_not_run(run: Callable[..., acceptance.Report]) -> None:
    Engines.vices = {"third": ("never-starts",)}
    report = run()
    assert report.exit_code == 1
    assert set(_by_status(report, "exactness")) == {"passed"}
    assert len(_by_status(report, "faults")["failed"]) == 1
    assert len(_by_status(report, "faults")["not run"]) == 8
    assert len(_by_status(report, kills.PART)["not run"]) == 7
    assert "end of its log" not in report.markdown()


def test_answers_that_prove_nothing_are_not_compared(
    run: Callable[..., acceptance.Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "answer", lambda *_: ([7] * 16, 0))
    report = run()
    assert report.exit_code == 2
    assert [check.name for check in report.checks if check.part != "conformance"] == ["all checks"] * 3
    assert all("comparing them would prove nothing" in check.reason for check in report.checks if check.part != "conformance")


def test_what_does_not_fit_is_said(run: Callable[..., acceptance.Report]) -> None:
    report = run(budget_s=30.0)
    assert report.exit_code == 2
    reasons = {check.reason for check in report.checks if check.status == "not run" and check.needed}
    assert reasons == {"the time was over"}
