"""Decode's side of a transfer: meet the prefill engine, read the blocks, ask whether they were held. Knows nothing of vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.core.recent import RecentSet
from kvpool.stores.base import Batch, Status
from kvpool.transfer.base import OneSidedEngine, StagedEngine, TransferEngine
from kvpool.transfer.channel import Caller, ChannelError, Line
from kvpool.transfer.messages import Begin, End, Gone, Held, Hello, RankLayout, Ready, Refused, Release, Wait, Welcome
from kvpool.transfer.names import choice_of, object_keys
from kvpool.transfer.offer import Offer
from kvpool.transfer.plan import PlanError, SpanReads, plan_reads
from kvpool.transfer.service import pool_differences

logger = logging.getLogger(__name__)

ANSWER_S = 3.0  # an answer takes well under a millisecond of prefill's time
RETRY_S = 0.003
DEAD_S = 2.0  # how long a prefill engine that did not answer is not asked again


class PullError(Exception):
    """The KV could not be had: the reason in one line."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one KV-cache group: block ``indexes[i]`` of the request belongs into our block ``block_ids[i]``."""

    group: int
    indexes: Sequence[int]
    block_ids: Sequence[int]


@dataclass(slots=True)
class Peer:
    """A prefill engine that we have met."""

    instance: str
    ranks: dict[int, RankLayout]
    reached: set[int] = field(default_factory=set)
    plans: dict[int, list[SpanReads]] = field(default_factory=dict)


class Puller:
    """One per decode rank; several threads pull at once. ``readers`` is decode's tensor parallel size."""

    def __init__(
        self, engine: TransferEngine, caller: Caller, layout: RankLayout, readers: int, record: str, pool: Mapping[str, str]
    ) -> None:
        self._engine = engine
        self._caller = caller
        self._layout = layout
        self._readers = readers
        self._record = record
        self._pool = dict(pool)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._dead = RecentSet(256, DEAD_S)
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def pull(self, offer: Offer, pull: str, prompt: str, wanted: Sequence[Wanted], deadline_s: float) -> int:
        """Bytes read into the wanted blocks; ``pull`` is the same on all ranks of one pull, and on no other. PullError where the
        blocks hold anything else than prefill's KV when this returns."""
        end = time.monotonic() + deadline_s
        where = (offer.host, offer.port)
        if where in self._dead:
            raise PullError(f"prefill at {offer.host}:{offer.port} did not answer a moment ago")
        try:
            with self._caller.line(*where) as line:
                try:
                    peer = self._meet(line, offer, end)
                except PullError as error:
                    line.ask(Release(offer.transfer_id, offer.instance, str(error)), ANSWER_S)  # nobody here can read it
                    raise
                tables = self._begin(line, offer, pull, prompt, end)
                try:
                    nbytes = self._read(peer, offer, tables, wanted, end)
                except PlanError as error:
                    raise PullError(str(error)) from None
                finally:
                    verdict = self._end(line, offer, pull)
        except ChannelError as error:
            self._dead.add([where])
            self._forget(where)
            raise PullError(str(error)) from None
        if verdict:
            raise PullError(f"transfer {offer.transfer_id}: prefill did not hold the blocks to the end: {verdict}")
        return nbytes

    def _meet(self, line: Line, offer: Offer, end: float) -> Peer:
        where = (offer.host, offer.port)
        with self._lock:
            peer = self._peers.get(where)
        if peer is not None and peer.instance == offer.instance:
            return peer
        hello = Hello(self._record, self._readers, self._engine.name, self._pool)
        reply = _patiently(line, hello, end)
        if isinstance(reply, Refused):
            raise PullError(f"prefill at {offer.host}:{offer.port} refuses: {reply.reason}")
        if not isinstance(reply, Welcome):
            raise PullError(f"prefill at {offer.host}:{offer.port} answered {type(reply).__name__} to a hello")
        peer = Peer(reply.instance, {layout.rank: layout for layout in reply.ranks})
        with self._lock:
            self._peers[where] = peer
        for difference in pool_differences(reply.pool, self._pool):
            self._tell(difference)
        return peer

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("kvpool: %s: what one side stores the other never finds", text)

    def _forget(self, where: tuple[str, int]) -> None:
        with self._lock:
            self._peers.pop(where, None)

    def _begin(self, line: Line, offer: Offer, pull: str, prompt: str, end: float) -> tuple[tuple[int, ...], ...]:
        request = Begin(offer.transfer_id, offer.instance, pull, self._layout.rank, prompt)
        try:
            reply = _patiently(line, request, end)
        except ChannelError:
            reply = _patiently(line, request, end)  # if the answer was lost, prefill waits for our end
        if isinstance(reply, Ready):
            return reply.tables
        reason = reply.reason if isinstance(reply, Gone | Refused) else f"unexpected answer {type(reply).__name__}"
        raise PullError(f"transfer {offer.transfer_id} is not to be had: {reason}")

    def _end(self, line: Line, offer: Offer, pull: str) -> str:
        """Tell prefill that we are done, whatever came of it. Why what was read is worth nothing; "" where it is good."""
        request = End(offer.transfer_id, offer.instance, pull, self._layout.rank)
        try:
            reply = line.ask(request, ANSWER_S)
        except ChannelError:
            reply = line.ask(request, ANSWER_S)  # lost on the way, there or back: it means the same twice
        if isinstance(reply, Held):
            return ""
        return reply.reason if isinstance(reply, Gone | Refused) else f"unexpected answer {type(reply).__name__}"

    def _plan(self, peer: Peer, choice: int) -> list[SpanReads]:
        replicas = max((span.replicas for layout in peer.ranks.values() for span in layout.spans), default=1)
        kind = choice % _common(peer) if replicas > 1 else 0
        with self._lock:
            plan = peer.plans.get(kind)
        if plan is None:
            plan = plan_reads(self._layout, peer.ranks.values(), choice)
            with self._lock:
                peer.plans[kind] = plan
        return plan

    def _reach(self, peer: Peer, rank: int) -> bytes:
        address = peer.ranks[rank].address
        if rank not in peer.reached:
            if reason := self._engine.reach(address):
                raise PullError(f"rank {rank} of prefill cannot be reached: {reason}")
            peer.reached.add(rank)
        return address

    def _read(self, peer: Peer, offer: Offer, tables: tuple[tuple[int, ...], ...], wanted: Sequence[Wanted], end: float) -> int:
        moved = 0
        rows = {one.group: one for one in wanted if len(one.block_ids)}
        theirs = {group: _their_blocks(tables, one) for group, one in rows.items()}
        for reads in self._plan(peer, choice_of(offer.transfer_id)):
            one = rows.get(reads.group)
            if one is None:
                continue
            address = self._reach(peer, reads.rank)
            left = max(0.0, end - time.monotonic())
            if isinstance(self._engine, OneSidedEngine):
                result = self._engine.read(address, reads.runs(theirs[reads.group], one.block_ids), left)
            else:
                assert isinstance(self._engine, StagedEngine)
                result = self._engine.fetch(self._batch(peer, offer, reads, one), left)
            if result.status is not Status.OK:
                code = f" (code {result.code})" if result.code is not None else ""
                raise PullError(f"reading from rank {reads.rank} of prefill failed: {result.status.value}{code} {result.text}")
            moved += result.nbytes
        return moved

    def _batch(self, peer: Peer, offer: Offer, reads: SpanReads, one: Wanted) -> Batch:
        """A published object is scattered over our pages as a whole."""
        pages = len(peer.ranks[reads.rank].spans[reads.span_index].pages)
        if len(reads.pieces) != pages or not all(piece.whole for piece in reads.pieces):
            raise PlanError("transfer_engine local_host moves whole shards of prefill: decode.tp_size must divide prefill's")
        addresses, sizes = reads.scatter(one.block_ids)
        return Batch(object_keys(offer.transfer_id, reads.rank, reads.span_index, one.indexes), addresses, sizes)


def _patiently(line: Line, request: Hello | Begin, end: float) -> object:
    """Ask until the answer is not "wait"."""
    while True:
        left = end - time.monotonic()
        reply = line.ask(request, min(ANSWER_S, max(0.05, left)))
        if not isinstance(reply, Wait):
            return reply
        if left <= 0:
            raise PullError("prefill was not ready before the deadline")
        time.sleep(RETRY_S)


def _common(peer: Peer) -> int:
    """A number that all replica counts of the peer divide: transfers that agree modulo it have the same plan."""
    product = 1
    for replicas in {span.replicas for layout in peer.ranks.values() for span in layout.spans}:
        product *= replicas
    return product


def _their_blocks(tables: tuple[tuple[int, ...], ...], one: Wanted) -> list[int]:
    table = tables[one.group] if one.group < len(tables) else ()
    blocks = [table[i] if i < len(table) else 0 for i in one.indexes]
    if 0 in blocks:
        missing = one.indexes[blocks.index(0)]
        raise PullError(f"prefill holds no KV of block {missing} of group {one.group}")
    return blocks
