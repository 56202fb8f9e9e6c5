"""Which bytes of which prefill rank make up a page of this decode rank: tensor and pipeline sizes may differ on both sides.

Pure arithmetic over layouts. Where several ranks hold the same heads, ``choice`` (the same number on both sides) picks one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool.transfer.base import Int64, Runs
from kvpool.transfer.messages import PageLayout, RankLayout, SpanLayout


class PlanError(ValueError):
    """The two sides do not fit together: what is missing or differs, in one line."""


class Piece(NamedTuple):
    """``nbytes`` from ``source + b * source_stride`` in prefill's block b to ``target + c * target_stride`` in our block c."""

    source: int
    source_stride: int
    target: int
    target_stride: int
    nbytes: int
    whole: bool  # all of prefill's page


class Source(NamedTuple):
    """A page of prefill, and where it is found there."""

    rank: int
    span_index: int
    span: SpanLayout
    page: PageLayout


@dataclass(frozen=True, slots=True)
class SpanReads:
    """What is to be read of one span of one prefill rank: one piece for each of its pages that we need, in the span's order."""

    rank: int
    span_index: int
    group: int
    pieces: tuple[Piece, ...]

    def _columns(self, theirs: Sequence[int], ours: Sequence[int]) -> tuple[Int64, Int64, Int64]:
        table = np.array([piece[:5] for piece in self.pieces], dtype=np.int64).reshape(-1, 5)
        source_ids, target_ids = np.asarray(theirs, dtype=np.int64), np.asarray(ours, dtype=np.int64)
        sources = table[:, 0][None, :] + source_ids[:, None] * table[:, 1][None, :]
        targets = table[:, 2][None, :] + target_ids[:, None] * table[:, 3][None, :]
        return sources, targets, table[:, 4]

    def runs(self, theirs: Sequence[int], ours: Sequence[int]) -> Runs:
        """Byte runs of whole blocks: prefill's block ``theirs[i]`` into our block ``ours[i]``."""
        sources, targets, sizes = self._columns(theirs, ours)
        return Runs(sources.ravel(), targets.ravel(), np.tile(sizes, len(theirs)))

    def scatter(self, ours: Sequence[int]) -> tuple[Int64, Int64]:
        """Where the pages of a published object go: addresses ``[blocks, pages]`` and sizes of the pages."""
        _, targets, sizes = self._columns([0] * len(ours), ours)
        return targets, sizes


def publishes(span: SpanLayout, choice: int) -> bool:
    """Whether this replica is the one that readers with ``choice`` read."""
    return span.replica == choice % span.replicas


def plan_reads(target: RankLayout, sources: Iterable[RankLayout], choice: int) -> list[SpanReads]:
    """All that ``target`` must read for its blocks, by span. PlanError where the ranks of prefill do not cover it exactly."""
    table: dict[tuple[int, int, str, str], list[Source]] = defaultdict(list)
    for layout in sources:
        for index, span in enumerate(layout.spans):
            for page in span.pages:
                table[(span.group, page.layer, page.name, span.note)].append(Source(layout.rank, index, span, page))
    reads: dict[tuple[int, int, int], list[tuple[int, Piece]]] = defaultdict(list)
    for span in target.spans:
        for page in span.pages:
            found = table.get((span.group, page.layer, page.name, span.note), [])
            for source, piece in _cover(span, page, found, choice):
                order = source.span.pages.index(source.page)
                reads[(source.rank, source.span_index, span.group)].append((order, piece))
    return [SpanReads(*where, tuple(piece for _, piece in sorted(pieces, key=lambda p: p[0]))) for where, pieces in reads.items()]


def _cover(span: SpanLayout, page: PageLayout, found: list[Source], choice: int) -> list[tuple[Source, Piece]]:
    """Every head of the page from exactly one source, neighbours together."""
    pieces = []
    head = span.first_head
    while head <= span.last_head:
        holders = [s for s in found if s.span.first_head <= head <= s.span.last_head]
        if not holders:
            heads = f"head {head}" if head == span.last_head else f"heads {head}-{span.last_head}"
            raise PlanError(f"group {span.group}, layer {page.name}: {heads}{span.note} are on no rank of prefill")
        holders.sort(key=lambda s: (s.span.replica, s.rank))
        source = holders[choice % len(holders)]
        last = min(span.last_head, source.span.last_head)
        pieces.append((source, _piece(span, page, source, head, last)))
        head = last + 1
    return pieces


def _piece(span: SpanLayout, page: PageLayout, source: Source, first: int, last: int) -> Piece:
    theirs, their_page = source.span, source.page
    if (theirs.first_head, theirs.last_head) == (span.first_head, span.last_head):
        if their_page.nbytes != page.nbytes:
            raise PlanError(f"layer {page.name}: a block has {their_page.nbytes} bytes on prefill, {page.nbytes} on decode")
        return Piece(their_page.base, their_page.stride, page.base, page.stride, page.nbytes, whole=True)
    if not (span.head_major and theirs.head_major):
        raise PlanError(
            f"layer {page.name}: pages are not stored head by head, so unequal tensor parallel sizes cannot share them: "
            "use the same tp_size on prefill and decode"
        )
    width = _head_bytes(span, page)
    if width != _head_bytes(theirs, their_page):
        raise PlanError(f"layer {page.name}: a head has {_head_bytes(theirs, their_page)} bytes on prefill, {width} on decode")
    source_at = their_page.base + (first - theirs.first_head) * width
    target_at = page.base + (first - span.first_head) * width
    whole = (first, last) == (theirs.first_head, theirs.last_head)
    return Piece(source_at, their_page.stride, target_at, page.stride, (last - first + 1) * width, whole)


def _head_bytes(span: SpanLayout, page: PageLayout) -> int:
    heads = span.last_head - span.first_head + 1
    if page.nbytes % heads:
        raise PlanError(f"layer {page.name}: {page.nbytes} bytes do not divide among {heads} heads")
    return page.nbytes // heads
