"""The prefill side's books: which transfers are open, who has read them, and whether they were held all the time.

A transfer is open from the end of its request until every reader has ended, somebody released it, or its time is up; whatever
comes first ends it, once. It is read by one pull, the first that begins: that pull's readers count, nobody else's. Readers learn
from the answer to their ``end`` whether the blocks were still held then: only that makes what they have read worth anything. Asked
from the channel's thread and the engine's; all methods are thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.core.recent import RecentSet

REMEMBERED = 4096
"""Ended transfers that late and repeated messages can still be told apart by; also how many that never were are remembered."""

_OWNED = "another pull reads it: an offer serves one decode engine, once"

Tables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Transfer:
    """``staged``: None where readers read KV memory itself, else whether it has been published for them."""

    transfer_id: str
    prompt: str
    tables: Tables
    until: float
    staged: bool | None
    owner: str | None = None  # the pull that reads it
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Closed:
    """How a transfer ended; ``reason`` is empty where every reader has read it. ``released``: nobody wanted it any more."""

    transfer_id: str
    reason: str
    owner: str | None
    readers: frozenset[int]
    released: bool = False


class Ledger:
    """For one engine, whose transfers each have ``readers`` readers."""

    def __init__(self, readers: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._readers = readers
        self._timeout = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, Transfer] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._news: list[Closed] = []
        self._unwanted = RecentSet(REMEMBERED, timeout_s, clock)  # released by force before they were opened

    def open(self, transfer_id: str, prompt: str, tables: Sequence[Sequence[int]], staged: bool) -> bool:
        """False, and nothing is open, where it has been released already: a proxy may give up before prefill has finished."""
        until = self._clock() + self._timeout
        transfer = Transfer(transfer_id, prompt, tuple(map(tuple, tables)), until, False if staged else None)
        with self._lock:
            if transfer_id in self._unwanted:
                return False
            self._open[transfer_id] = transfer
            return True

    def published(self, transfer_id: str, failure: str = "") -> None:
        """All ranks have copied a staged transfer, or at least one could not."""
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is None:
                return
            if failure:
                self._close(transfer, f"prefill could not publish it: {failure}")
            transfer.staged = True

    def begin(self, transfer_id: str, pull: str, reader: int, prompt: str) -> Tables | str | None:
        """The tables to read from; None: ask again; a text: why it cannot be read. The first pull to begin owns the transfer."""
        with self._lock:
            transfer = self._find(transfer_id)
            if isinstance(transfer, str):
                return transfer
            if transfer.prompt != prompt:
                return "it is of another prompt"
            if not 0 <= reader < self._readers:
                return f"reader {reader} is none of the {self._readers} that prefill was told of (decode.tp_size)"
            if transfer.owner not in (None, pull):
                return _OWNED
            if transfer.staged is False:
                return None
            transfer.owner = pull
            transfer.begun.add(reader)
            return transfer.tables

    def end(self, transfer_id: str, pull: str, reader: int) -> str:
        """A reader that has begun has read or given up. "" where the blocks were held until now, else why not. The same again for
        a repetition."""
        with self._lock:
            closed = self._closed.get(transfer_id)
            if closed is not None:
                return "" if pull == closed.owner and reader in closed.readers else self._gone(closed)
            transfer = self._find(transfer_id)
            if isinstance(transfer, str):
                return transfer
            if pull != transfer.owner:
                return _OWNED if transfer.owner is not None else "it has not begun to read it"
            if reader not in transfer.begun:
                return f"reader {reader} has not begun to read it"
            transfer.ended.add(reader)
            if len(transfer.ended) == self._readers:
                self._close(transfer, "")
            return ""

    def knows(self, transfer_id: str) -> bool:
        """Whether it is open, or has ended not long ago."""
        with self._lock:
            return transfer_id in self._open or transfer_id in self._closed

    def release(self, transfer_id: str, reason: str, pull: str = "", force: bool = False) -> None:
        """Nobody will read it: ends at once, unless a reader is at it, who will end it. ``pull``: its own have returned. ``force``:
        whoever is at it, and also where it is yet to be opened."""
        with self._lock:
            transfer = self._open.get(transfer_id)
            if transfer is not None and (force or transfer.owner in (None, pull)):
                self._close(transfer, reason, released=True)
            elif transfer is None and force and transfer_id not in self._closed:
                self._unwanted.add([transfer_id])

    def drop_all(self, reason: str) -> None:
        """End everything: what is being read is worth nothing."""
        with self._lock:
            for transfer in list(self._open.values()):
                self._close(transfer, reason)

    def take_closed(self) -> list[Closed]:
        """What has ended since the last call, each transfer exactly once; ends what is overdue."""
        with self._lock:
            now = self._clock()
            for transfer in [t for t in self._open.values() if t.until <= now]:
                self._overdue(transfer)
            news, self._news = self._news, []
            return news

    def __len__(self) -> int:
        return len(self._open)

    # under the lock

    def _find(self, transfer_id: str) -> Transfer | str:
        transfer = self._open.get(transfer_id)
        if transfer is None:
            closed = self._closed.get(transfer_id)
            return self._gone(closed) if closed is not None else "it is unknown here"
        if transfer.until <= self._clock():
            return self._gone(self._overdue(transfer))
        return transfer

    def _overdue(self, transfer: Transfer) -> Closed:
        missing = self._readers - len(transfer.ended)
        return self._close(transfer, f"{missing} of {self._readers} readers had not read it after {self._timeout:g} s")

    def _gone(self, closed: Closed) -> str:
        return closed.reason or "all readers have ended"

    def _close(self, transfer: Transfer, reason: str, released: bool = False) -> Closed:
        self._open.pop(transfer.transfer_id, None)
        closed = Closed(transfer.transfer_id, reason, transfer.owner, frozenset(transfer.ended), released)
        self._closed[transfer.transfer_id] = closed
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)
        self._news.append(closed)
        return closed
