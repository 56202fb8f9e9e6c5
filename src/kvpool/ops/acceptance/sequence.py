"""The whole run: which engines there are, and what is asked of them in which order. Five are started, six with the restart."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.ops.acceptance import conformance, exactness, faults, kills
from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import NOT_ASKED, Book, Task, Wrong
from kvpool.ops.acceptance.engines import Engine, Engines
from kvpool.ops.acceptance.expected import FAULTY, Expected, ask_reference
from kvpool.ops.acceptance.facts import gather, model_name
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.acceptance.report import Report
from kvpool.ops.launch import LaunchOptions, Place, Plan, launched
from kvpool.ops.launch.plan import PoolService
from kvpool.ops.launch.signals import Signals

SYNC, ASYNC = "load_async: false", "load_async: true"
WITH_ENGINES = (exactness.PART, faults.PART, kills.PART)
TRIES_OF_A_SERVICE = 3
Say = Callable[[str], None]


def run(options: AcceptanceOptions, say: Say) -> Report:
    """``options`` have been checked. OSError or ValueError where nothing at all can be run; ``Told`` where a signal says to end."""
    began = time.monotonic()
    book = Book(options.budget_s, options.parts, say)
    model, name = _model(options)
    report = Report(gather(options, name), book.checks)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="kvpool-acceptance-"))
    try:
        with Signals():
            conformance.run(book, options.backend, folder)
        _with_engines(book, options, model, folder, report, say)
    finally:
        if options.logs is None:
            shutil.rmtree(folder, ignore_errors=True)
    report.facts["took"] = f"{time.monotonic() - began:.0f} s of {options.budget_s:.0f} s"
    return report


def _model(options: AcceptanceOptions) -> tuple[str, str]:
    """Its folder, and what a report calls it."""
    if options.model is not None:
        return options.model, model_name(Path(options.model))
    from kvpool.ops.demo.smollm import model_folder

    return str(model_folder()), "SmolLM2-135M-Instruct, of the demo"


def _with_engines(book: Book, options: AcceptanceOptions, model: str, folder: Path, report: Report, say: Say) -> None:
    """What keeps the engine without the pool from answering is entered for every part that needs it."""
    problem = "" if any(book.wants(part) for part in WITH_ENGINES) else NOT_ASKED
    places: list[Place] = []

    def service_only(launch: LaunchOptions, place: Place) -> Plan:
        places.append(place)
        return Plan((), "", "", PoolService(options.backend, options.dram, 0) if options.backend != "local" else None)

    try:
        if not problem:
            asked = LaunchOptions("mixed", model, options.backend, dram=options.dram)
            with launched(asked, say, book.left(), folder, plan=service_only) as (_, launch):
                engines = Engines(options, model, launch, places[0], book.left)
                _parts(book, engines, _reference(engines, report))
    except (OSError, ValueError, Wrong) as error:
        problem = str(error)
        say(problem)
    for part in WITH_ENGINES:
        if not any(check.part == part for check in book.checks):
            book.skip(part, "all checks", problem if book.wants(part) else NOT_ASKED, needed=book.wants(part))


def _reference(engines: Engines, report: Report) -> Expected:
    """The right answers. OSError or ``Wrong`` where there are none to compare with."""
    engine = engines.engine("reference", None)
    engines.start(engine)
    expected = ask_reference(engine.client)
    differ = expected.split_matters
    words = (
        f"for {differ} prompts it depends on how they are split; either answer is right"
        if differ
        else "does not depend on how prompts are split"
    )
    report.facts["arithmetic of the engine without the pool"] = words
    engines.end(engine)
    return expected


def _parts(book: Book, engines: Engines, expected: Expected) -> None:
    tries = TRIES_OF_A_SERVICE if engines.service else 1

    def asking(engine: Engine) -> Asking:
        return Asking(engine.client, expected, tries)

    plan = faults.Plan(engines.root / "faults.json")
    first = engines.engine("first", {"load_async": False}, policy="fail")
    second = engines.engine("second", {"load_async": True})
    third = engines.engine("third", {"load_async": True, "fault_plan_path": str(plan.path), **faults.SHORT_DEADLINES})
    fourth = engines.engine("fourth", {"load_async": True})

    def up(name: str, *wanted: Engine, ended: Engine | None = None) -> Task:
        def start() -> str:
            if ended is not None:
                engines.end(ended)
            return ", ".join(engines.start(engine) for engine in wanted)

        return Task(name, start, stop=True, seconds=40)

    book.run(exactness.PART, [up("an engine with the pool starts", first), *exactness.first_engine(asking(first), SYNC)])
    book.run(
        exactness.PART, [up("another one starts after it", second, ended=first), *exactness.second_engine(asking(second), ASYNC)]
    )
    book.run(
        faults.PART,
        [up("an engine with a store that can be made to fail starts", third), *faults.tasks(asking(third), plan, FAULTY)],
    )
    scene = kills.Scene(engines, kept=third, victim=second, anew=fourth, asking=asking)
    book.run(kills.PART, [up("two engines run on one pool", second, third), *kills.tasks(scene)])
