"""Saves that wait for the loads of their step.

A synchronous load fails inside the step whose forward already builds on it, and what one rank failed to load spoils what every rank
computes. So a save planned while such a load is open is sent only when all ranks have said that the load was good; its blocks are
pinned meanwhile.
"""

from __future__ import annotations

from kvpool.core.jobs import SaveJob


class HeldSaves:
    """``hold`` -> ``take_ready``, or cancelled by ``load_failed``."""

    def __init__(self) -> None:
        self._waiting: list[tuple[SaveJob, set[int]]] = []

    def hold(self, job: SaveJob, loads: set[int]) -> None:
        """Keep a save until the loads with these job ids have ended well; none is fine."""
        self._waiting.append((job, set(loads)))

    def load_ended(self, job_id: int) -> None:
        for _, loads in self._waiting:
            loads.discard(job_id)

    def load_failed(self, job_id: int) -> list[SaveJob]:
        """The saves that were planned on top of this load: never to be sent."""
        spoiled = [job for job, loads in self._waiting if job_id in loads]
        self._waiting = [(job, loads) for job, loads in self._waiting if job_id not in loads]
        return spoiled

    def take_ready(self) -> list[SaveJob]:
        ready = [job for job, loads in self._waiting if not loads]
        self._waiting = [(job, loads) for job, loads in self._waiting if loads]
        return ready

    def __len__(self) -> int:
        return len(self._waiting)
