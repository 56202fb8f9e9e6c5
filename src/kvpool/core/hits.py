"""Hits: from per-block answers of several KV-cache groups to one usable prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

WINDOW_PIECE = 256  # blocks of a windowed group asked for at once when searching backwards


class Presence(Enum):
    """What a store says of one block over all its shards."""

    HIT = "hit"
    MISS = "miss"
    UNKNOWN = "unknown"


class GroupKind(Enum):
    FULL = "full"  # every earlier token is needed (GQA, MLA)
    SLIDING = "sliding"  # the last ``window`` tokens
    CHUNKED = "chunked"  # the tokens of the current chunk of ``window`` tokens


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a hit needs of one KV-cache group. ``units`` is how many hash units one of its blocks spans."""

    block_size: int
    units: int
    kind: GroupKind = GroupKind.FULL
    window: int = 0

    def first_needed(self, tokens: int) -> int:
        """The first block that must be present for a hit of ``tokens`` tokens (a multiple of the block size)."""
        if self.kind is GroupKind.SLIDING:
            return max(0, tokens - self.window + 1) // self.block_size
        if self.kind is GroupKind.CHUNKED:
            return tokens // self.window * self.window // self.block_size
        return 0

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.block_size}/{self.window}"


class Prefix(NamedTuple):
    """The longest usable prefix in tokens; ``unknown`` when it might have been longer but the store could not say."""

    tokens: int
    unknown: bool


# presence of blocks [first, last) of a group, in order; may stop early after the first block that is no hit
Probe = Callable[[int, int, int], Sequence[Presence]]


def alignment(groups: Sequence[GroupSpec]) -> int:
    """Hits are multiples of this many tokens: a block boundary of every group."""
    return math.lcm(*(g.block_size for g in groups))


def find_prefix(groups: Sequence[GroupSpec], computed: int, limit: int, probe: Probe) -> Prefix:
    """The longest prefix of at most ``limit`` tokens usable beyond ``computed`` tokens that the engine has by itself.

    A boundary counts only when *every* group has what it needs there: an intersection of boundaries, not a minimum of lengths.
    Only blocks past ``computed`` are asked for: the engine holds the others, and a longer hit needs none that it has dropped.
    """
    step = alignment(groups)
    best, unknown = limit // step * step, False
    for index, group in enumerate(groups):
        if group.kind is not GroupKind.FULL or best <= computed:
            continue
        first = computed // group.block_size
        answers = probe(index, first, best // group.block_size)
        good = _leading_hits(answers)
        unknown |= good < len(answers) and answers[good] is Presence.UNKNOWN
        best = min(best, (first + good) * group.block_size) // step * step
    windowed = [i for i, g in enumerate(groups) if g.kind is not GroupKind.FULL]
    asked: dict[tuple[int, int], Presence] = {}
    while windowed and best > computed:
        fits = [_largest_window(groups[i], i, computed, best, probe, asked) for i in windowed]
        if min(fits) == best:
            break
        best = min(fits) // step * step
    unknown |= any(answer is Presence.UNKNOWN for answer in asked.values())
    return Prefix(max(best, computed), unknown)


def needed_blocks(group: GroupSpec, computed: int, tokens: int) -> range:
    """Blocks that a hit of ``tokens`` tokens needs from the pool, where the engine has ``computed`` tokens by itself."""
    return range(max(computed // group.block_size, group.first_needed(tokens)), tokens // group.block_size)


def _leading_hits(answers: Sequence[Presence]) -> int:
    for count, answer in enumerate(answers):
        if answer is not Presence.HIT:
            return count
    return len(answers)


def _largest_window(
    group: GroupSpec, index: int, computed: int, tokens: int, probe: Probe, asked: dict[tuple[int, int], Presence]
) -> int:
    """The largest boundary, at most ``tokens``, whose window is present; ``computed`` when there is none. Asks for each block once:
    first for the window at ``tokens``, then backwards in larger pieces."""
    floor, end = computed // group.block_size, tokens // group.block_size
    piece = len(needed_blocks(group, computed, tokens))

    def present(block: int) -> bool:
        if (index, block) not in asked:
            blocks = range(max(floor, block + 1 - piece), block + 1)
            answers = list(probe(index, blocks.start, blocks.stop))
            answers += [Presence.MISS] * (len(blocks) - len(answers))
            asked.update(((index, b), a) for b, a in zip(blocks, answers, strict=True) if (index, b) not in asked)
        return asked[index, block] is Presence.HIT

    while end * group.block_size > computed:
        window = needed_blocks(group, computed, end * group.block_size)
        missing = next((b for b in reversed(window) if not present(b)), None)
        if missing is None:
            return end * group.block_size
        end, piece = missing, max(piece, WINDOW_PIECE)
    return computed
