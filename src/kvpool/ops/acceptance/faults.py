"""Faults injected into the store of a running engine: the answer stays right, comes in time, and the engine is well afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.ops.acceptance.asking import Asking
from kvpool.ops.acceptance.book import Task, Unseen, Wrong

PART = "faults"
SEEN_S = 5.0
SHORT_DEADLINES = {
    "lookup_timeout_ms": 500,
    "load_timeout_ms": 2000,
    "save_timeout_ms": 2000,
    "lease_ms": 6000,
    "breaker_failures": 3,
    "breaker_cooldown_ms": 300,
    "negative_cache_ms": 1,
}
"""Options of the engine with faults, so that the deadlines pass within the run."""


@dataclass(frozen=True, slots=True)
class Injected:
    """``stored``: the prompt is in the pool when the fault begins. ``seen``: the counter, with labels, that must tell of it."""

    name: str
    calls: Mapping[str, Mapping[str, Any]]
    stored: bool
    seen: tuple[str, Mapping[str, str]]


NO_LABELS: Mapping[str, str] = {}
LOAD_FAILED = ("kvpool:load_failures_total", NO_LABELS)
SAVE_FAILED = ("kvpool:save_failures_total", NO_LABELS)
FAULTS = (
    Injected("every get fails", {"get": {"status": "transient"}}, True, LOAD_FAILED),
    Injected("a get answers for too few keys", {"get": {"result_change": -1}}, True, LOAD_FAILED),
    Injected("a get hangs", {"get": {"hang": True}}, True, LOAD_FAILED),
    Injected("a lookup hangs", {"exists": {"hang": True}}, True, ("kvpool:misses_total", {"reason": "timeout"})),
    Injected("a put finds no space", {"put": {"full": True}}, False, SAVE_FAILED),
    Injected("a put hangs", {"put": {"hang": True}}, False, SAVE_FAILED),
)


class Plan:
    """The file from which an engine's store reads its faults."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps({"calls": calls}))
        aside.replace(self.path)


def tasks(asking: Asking, plan: Plan, names: tuple[str, ...]) -> list[Task]:
    """``names``: a prompt for each fault, one more for the control and the end."""
    made = [
        Task(fault.name, lambda fault=fault, name=name: _one(asking, plan, fault, name))  # type: ignore[misc]
        for fault, name in zip(FAULTS, names, strict=False)
    ]
    last = names[len(FAULTS)]
    return [
        *made,
        Task("hits again after the faults", lambda: _well(asking, plan, last)),
        Task("control: flipped bits in what a get brings are seen as wrong tokens", lambda: _control(asking, plan, last)),
    ]


def _one(asking: Asking, plan: Plan, fault: Injected, name: str) -> str:
    if fault.stored:
        asking.right(name)
        asking.client.empty_cache()
    counter, labels = fault.seen
    before = asking.client.count(counter, **labels)
    plan.set(fault.calls)
    try:
        answered = asking.in_time(name)
        seen = _counted(asking, counter, labels, before)
    finally:
        plan.set({})
    if seen <= before:
        raise Unseen(f"the answer is right, but {counter} does not tell of the fault: it did not happen")
    asking.client.empty_cache()
    asking.right(name)
    return f"{answered}, and again when the fault was over"


def _counted(asking: Asking, counter: str, labels: Mapping[str, str], before: int) -> int:
    """Once it is more than before, or the time is over. What is late is found in a later step."""
    end = time.monotonic() + SEEN_S
    while (seen := asking.client.count(counter, **labels)) <= before and time.monotonic() < end:
        asking.client.nudge()
        time.sleep(0.2)
    return seen


def _control(asking: Asking, plan: Plan, name: str) -> str:
    """A comparison that cannot fail proves nothing. Last, so that nothing is built on the spoiled blocks: the hit is whole."""
    asking.right(name)
    asking.hit(name)
    asking.client.empty_cache()
    plan.set({"get": {"corrupt": True}})
    try:
        asking.right(name)
    except Wrong:
        return "seen"
    finally:
        plan.set({})
        asking.client.empty_cache()
    raise Wrong("the answer from flipped bits counts as right: the comparison sees nothing here")


def _well(asking: Asking, plan: Plan, name: str) -> str:
    plan.set({})
    asking.client.empty_cache()
    asking.right(name)
    return asking.hit(name)
