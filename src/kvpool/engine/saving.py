"""The scheduler side of saves: which blocks a step fills and what is offered to the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvpool.core.hits import GroupSpec
from kvpool.core.jobs import BlockName, JobPart, block_names, split_part
from kvpool.core.keys import group_hashes
from kvpool.engine.requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

UNSAVED_LIMIT = 65536
RETRY_S = 1.0  # how often a request looks through its old blocks for some that were offered in vain


class Offer(NamedTuple):
    parts: list[JobPart]
    dropped: int  # blocks that found no room


class SaveOffers:
    """Decides what to offer. A block is offered once, when the step that fills it is scheduled; again only if it was not stored."""

    def __init__(self, groups: Sequence[GroupSpec], save_decode: bool) -> None:
        self._groups = groups
        self._save_decode = save_decode
        self._unsaved: dict[BlockName, None] = {}
        self._version = 0  # of the unsaved set: a request looks through its old blocks only when it has grown

    def note_unsaved(self, names: Iterable[BlockName]) -> None:
        """These did not reach the store: offer them when a request next holds them."""
        before = len(self._unsaved)
        for name in names:
            self._unsaved[name] = None
        self._version += len(self._unsaved) > before  # nothing new: no reason to look again
        while len(self._unsaved) > UNSAVED_LIMIT:
            del self._unsaved[next(iter(self._unsaved))]

    def forget_unsaved(self) -> None:
        self._unsaved.clear()

    def due(self, state: RequestState, start: int, end: int, room: int) -> bool:
        """Whether ``offer`` may have something to do: told without the block tables, which are long and costly to get."""
        if not state.offered:
            state.offered = [start // group.block_size for group in self._groups]
        end, hashes = self._end(state, end), len(state.request.block_hashes)
        filled = (min(end // group.block_size, hashes // group.units) for group in self._groups)
        return (room > 0 and self._again(state)) or any(last > first for last, first in zip(filled, state.offered, strict=True))

    def _end(self, state: RequestState, end: int) -> int:
        return end if self._save_decode else min(end, state.request.num_prompt_tokens)

    def _again(self, state: RequestState) -> bool:
        news = bool(self._unsaved) and state.seen_unsaved != self._version
        return news and time.monotonic() >= state.look_again_at

    def offer(self, state: RequestState, start: int, end: int, tables: Sequence[Sequence[int]], room: int) -> Offer:
        """Parts to save now that the step fills tokens ``start`` to ``end``; at most ``room`` blocks, what is over is unsaved.

        ``tables[g]`` is the block table of group g; null blocks (id 0) are skipped.
        """
        if not self.due(state, start, end, room):
            return Offer([], 0)
        end, again = self._end(state, end), room > 0 and self._again(state)
        parts: list[JobPart] = []
        dropped = 0
        for index, group in enumerate(self._groups):
            part = self._part(state, index, group, end, tables[index], again)
            kept, rest = split_part(part, room)
            self.note_unsaved((index, h) for h in rest.hashes)
            room -= len(kept)
            dropped += len(rest)
            for name in block_names([kept]):
                self._unsaved.pop(name, None)
            if len(kept):
                parts.append(kept)
        if again:
            state.seen_unsaved = self._version if not dropped else -1
            state.look_again_at = time.monotonic() + RETRY_S
        return Offer(parts, dropped)

    def _part(self, state: RequestState, index: int, group: GroupSpec, end: int, table: Sequence[int], again: bool) -> JobPart:
        hashes = state.request.block_hashes
        first, last = state.offered[index], min(end // group.block_size, len(hashes) // group.units)
        blocks = list(range(first, last))
        if again:
            earlier = group_hashes(hashes, group.units, 0, min(first, last))
            blocks = [i for i, h in enumerate(earlier) if (index, h) in self._unsaved] + blocks
        blocks = [i for i in blocks if i < len(table) and table[i] != 0]
        names: list[bytes] = [hashes[i * group.units + group.units - 1] for i in blocks]
        state.offered[index] = max(first, last)
        return JobPart(index, blocks, names, [table[i] for i in blocks])
