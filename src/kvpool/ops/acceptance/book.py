"""Runs checks one after another within one span of time, and keeps what came of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvpool.ops.acceptance.report import Check, Status, clean

OUT_OF_TIME = "the time was over"
NOT_ASKED = "not asked for (--only)"


class Wrong(Exception):
    """Something is not as it must be; the text says what, without anything of prompts or this machine."""


class Unseen(Wrong):
    """What must happen did not within the time that there was."""


class NotRun(Exception):
    """The check cannot be run here; the text says why. ``needed``: see ``Check``."""

    def __init__(self, reason: str, needed: bool = True) -> None:
        super().__init__(reason)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class Task:
    """``run`` returns what was seen, for the report; raises ``Wrong`` or ``NotRun``. OSError and everything else is a failure too.
    ``stop``: without this one the tasks after it make no sense. ``seconds``: not begun with less time left than that."""

    name: str
    run: Callable[[], str]
    stop: bool = False
    seconds: float = 5.0


class Book:
    """``parts``: those asked for. ``say`` gets a line for every check."""

    def __init__(self, budget_s: float, parts: Collection[str], say: Callable[[str], None]) -> None:
        self._end = time.monotonic() + budget_s
        self._parts, self._say = parts, say
        self.checks: list[Check] = []

    def left(self, most_s: float = float("inf")) -> float:
        """Seconds until the run must end, at most ``most_s`` and never below 0: the deadline of every wait."""
        return max(0.0, min(most_s, self._end - time.monotonic()))

    def wants(self, part: str) -> bool:
        return part in self._parts

    def run(self, part: str, tasks: Iterable[Task]) -> bool:
        """All in order. False where one with ``stop`` did not pass; those after it are entered as not run."""
        broken = ""
        for task in tasks:
            if broken:
                self.skip(part, task.name, broken)
            elif not self.wants(part):
                self.skip(part, task.name, NOT_ASKED, needed=False)
            elif self.left() < task.seconds:
                self.skip(part, task.name, OUT_OF_TIME)
                broken = OUT_OF_TIME if task.stop else ""
            else:
                passed = self._run(part, task)
                broken = "" if passed or not task.stop else f"not possible without: {task.name}"
        return not broken

    def skip(self, part: str, name: str, reason: str, needed: bool = True) -> None:
        self._enter(Check(part, name, "not run", 0.0, clean(reason), needed))

    def _run(self, part: str, task: Task) -> bool:
        began = time.monotonic()
        status: Status = "passed"
        needed = True
        try:
            reason = task.run()
        except NotRun as error:
            status, reason, needed = "not run", str(error), error.needed
        except Exception as error:  # noqa: BLE001 - what a check stumbles over is a failed check, and the others go on
            status, reason = "failed", str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            if isinstance(error, OSError | Unseen) and self.left() == 0:  # its deadline was cut short
                status, reason = "not run", f"{OUT_OF_TIME} in the middle of it"
        if "\n" in reason:
            self._say(reason)
        self._enter(Check(part, task.name, status, time.monotonic() - began, clean(reason), needed))
        return status == "passed"

    def _enter(self, check: Check) -> None:
        self.checks.append(check)
        if check.needed or check.status != "not run":
            self._say(f"{check.status:8}{check.part}: {check.name}{': ' if check.reason else ''}{check.reason}")
