"""Saves that wait for the synchronous loads of their step, whoever loads.

A synchronous load, ours or another connector's, runs inside the step whose forward builds on it, and what one rank failed to load
spoils what every rank computes. So a save planned while such a step is open is sent only when all ranks have said that they ran the
step and vLLM has heard of no bad block in it; its blocks are pinned meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.core.jobs import SaveJob


class HeldSaves:
    """``open_step`` and ``hold`` while planning, ``step_ended`` when ranks report, ``take_ready`` when planning the next step."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last = 0
        self._open: dict[int, int] = {}  # step -> ranks that have run it
        self._waiting: list[tuple[SaveJob, set[int]]] = []

    def open_step(self) -> int:
        """A step with synchronous loads is being planned; its number, for the workers to echo."""
        self._last += 1
        self._open[self._last] = 0
        return self._last

    def hold(self, job: SaveJob) -> None:
        """Keep a save until every step that is open now has ended well."""
        self._waiting.append((job, set(self._open)))

    def step_ended(self, echoes: Mapping[int, int], bad: bool) -> list[SaveJob]:
        """Ranks have run these steps (step -> how many of them). The saves to drop, where one ended ``bad``."""
        spoiled: list[SaveJob] = []
        for step, ranks in echoes.items():
            if step not in self._open:
                continue
            self._open[step] += ranks
            if bad:
                spoiled += [job for job, steps in self._waiting if step in steps]
                self._waiting = [(job, steps) for job, steps in self._waiting if step not in steps]
            if self._open[step] >= self._world_size:
                del self._open[step]
                for _, steps in self._waiting:
                    steps.discard(step)
        return spoiled

    def take_ready(self) -> list[SaveJob]:
        ready = [job for job, steps in self._waiting if not steps]
        self._waiting = [(job, steps) for job, steps in self._waiting if steps]
        return ready

    def __len__(self) -> int:
        return len(self._waiting)
