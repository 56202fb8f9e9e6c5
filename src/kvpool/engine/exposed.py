"""What a failed synchronous load leaves in vLLM's own prefix cache.

vLLM caches the blocks of a synchronous load, and those that the step computes on top of them, before the load has run. Where it
fails, vLLM relies on the same request to compute them again; if that request is aborted or preempted first, the next one with this
prefix would find wrong KV. So these blocks leave the cache as soon as the failure is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

Table = Sequence[int]


class ExposedTables:
    """Block tables of the requests that ran while a load was open."""

    def __init__(self) -> None:
        self._tables: dict[int, list[Table]] = {}

    def note(self, loads: Iterable[int], tables: list[Table]) -> None:
        """These requests run in a step in which the loads with these job ids are open."""
        for job_id in loads:
            self._tables.setdefault(job_id, []).extend(tables)

    def spoiled(self, job_id: int, bad: Set[int]) -> set[int]:
        """Blocks that are wrong, or were computed on top of wrong ones, where the load failed for the blocks ``bad``."""
        blocks = set(bad)
        for table in self._tables.get(job_id, ()):
            first = next((i for i, block in enumerate(table) if block in bad), len(table))
            blocks.update(table[first:])
        return blocks

    def forget(self, job_id: int) -> None:
        self._tables.pop(job_id, None)

    def __len__(self) -> int:
        return len(self._tables)
