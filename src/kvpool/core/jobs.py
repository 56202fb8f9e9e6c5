"""Jobs: one load or save of one request in one step, and what the workers report of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class JobPart:
    """Blocks of one KV-cache group: block ``indexes[i]`` of the request, named by ``hashes[i]``, lies in ``block_ids[i]``."""

    group: int
    indexes: list[int]
    hashes: list[bytes]
    block_ids: list[int]

    def __len__(self) -> int:
        return len(self.indexes)


@dataclass(slots=True)
class Job:
    """Ids are unique within an engine and never reused. ``deadline_s`` is what the worker may take, from when it starts."""

    job_id: int
    request_id: str
    parts: list[JobPart]
    deadline_s: float
    namespace: str

    @property
    def block_ids(self) -> list[int]:
        return [b for part in self.parts for b in part.block_ids]

    @property
    def num_blocks(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(slots=True)
class LoadJob(Job):
    is_async: bool = False


@dataclass(slots=True)
class SaveJob(Job):
    pass


BlockName = tuple[int, bytes]  # (group, block hash)


@dataclass(slots=True)
class JobReport:
    """What the ranks say of one job. ``ranks`` counts those that have ended it: their store calls have returned."""

    ranks: int = 0
    unsaved: list[BlockName] = field(default_factory=list)  # saves that did not happen: to be offered again
    failed: list[BlockName] = field(default_factory=list)  # loads that failed: not to be tried again soon
    gone: list[BlockName] = field(default_factory=list)  # of these, what the store said it does not have

    def merge(self, other: JobReport) -> None:
        self.ranks += other.ranks
        self.unsaved += other.unsaved
        self.failed += other.failed
        self.gone += other.gone


def split_part(part: JobPart, room: int) -> tuple[JobPart, JobPart]:
    """The first ``room`` blocks of a part, and the rest."""

    def cut(rows: slice) -> JobPart:
        return JobPart(part.group, part.indexes[rows], part.hashes[rows], part.block_ids[rows])

    return cut(slice(0, room)), cut(slice(room, None))


def block_names(parts: Sequence[JobPart]) -> list[BlockName]:
    return [(part.group, h) for part in parts for h in part.hashes]
