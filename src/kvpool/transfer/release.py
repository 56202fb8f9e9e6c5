"""Telling a prefill engine that nobody will read what it holds: for decode, and for proxies whose second leg never comes.

Threads of the releaser tell, so whoever releases never waits. An engine that does not answer (busy, stopped, out of reach) is asked
again, ever more rarely, until it has answered or its own time limit has freed what it holds. What waits for one engine is told in
order over one line, and its silence costs one question each time, however much waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvpool.core.recent import RecentSet
from kvpool.transfer.channel import Caller, ChannelError, Line
from kvpool.transfer.messages import Gone, Refused, Release
from kvpool.transfer.offer import Offer, read_offer
from kvpool.transfer.secret import Secret

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
RETRY_S = 0.5  # after the first question without an answer, then doubled
RETRY_MOST_S = 15.0
WAITING = 4096  # releases of all engines together
SAID_S = 60.0  # between two lines of the log about one engine


class Outcome(StrEnum):
    """What came of a release."""

    TOLD = "told"
    RESTARTED = "restarted"  # another start of prefill answers there: what was held went with the one before
    UNREACHABLE = "unreachable"  # no answer until the time of the offer was up
    DROPPED = "dropped"  # too many waited


Then = Callable[[Outcome], None]


@dataclass(eq=False, slots=True)
class _Peer:
    """A prefill engine for which releases wait, each until its time is up."""

    where: tuple[str, int]
    due: float
    waiting: dict[Release, tuple[float, Then]] = field(default_factory=dict)
    pause: float = 0.0  # since the last question without an answer; 0: there was none
    busy: bool = False  # a thread is at it


class Releaser:
    """Thread-safe; ``threads`` engines are told at a time. ``WAITING`` releases wait at most: beyond, the oldest of the engine for
    which most wait is dropped."""

    def __init__(self, caller: Caller, threads: int) -> None:
        self._caller = caller
        self._state = threading.Condition()
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._count = 0
        self._closed = False
        self._said = RecentSet(256, SAID_S)
        for number in range(threads):
            threading.Thread(target=self._loop, name=f"kvpool-release-{number}", daemon=True).start()

    def release(self, offer: Offer, reason: str, pull: str = "", force: bool = False, then: Then = lambda outcome: None) -> None:
        """Returns at once. ``pull``: one that has failed and reads no more; ``force``: nobody wants what is read of it. ``then`` is
        called once, from any thread, unless ``close`` comes before, or the same release waits already."""
        message = Release(offer.transfer_id, offer.instance, reason, pull, force)
        where, dropped = (offer.host, offer.port), None
        with self._state:
            if self._closed:
                return
            if self._count >= WAITING:
                dropped = self._drop_oldest()
            peer = self._peers.setdefault(where, _Peer(where, time.monotonic()))
            if message not in peer.waiting:
                peer.waiting[message] = (offer.until, then)
                self._count += 1
            self._state.notify_all()
        if dropped is not None:
            dropped(Outcome.DROPPED)

    def backlog(self) -> int:
        """Releases that have not ended."""
        return self._count

    def close(self, timeout_s: float) -> None:
        """Tell what can be told within ``timeout_s``; engines that have not answered before are not waited for. Idempotent."""
        with self._state:
            self._state.wait_for(lambda: all(peer.pause for peer in self._peers.values()), timeout_s)
            self._closed = True
            self._state.notify_all()
        self._caller.close()

    def _drop_oldest(self) -> Then:
        most = max(self._peers.values(), key=lambda peer: len(peer.waiting))
        return self._take(most, next(iter(most.waiting)))

    def _take(self, peer: _Peer, message: Release) -> Then:
        """Under the lock: it waits no more."""
        self._count -= 1
        return peer.waiting.pop(message)[1]

    # ---- the threads --------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (peer := self._next_peer()) is not None:
            try:
                problem = self._serve(peer)
            except Exception as error:
                logger.exception("kvpool: a release failed unexpectedly")
                problem = type(error).__name__
            self._leave(peer, problem)

    def _next_peer(self) -> _Peer | None:
        """The one whose turn it is; None at the end."""
        with self._state:
            while not self._closed:
                now = time.monotonic()
                first = min((p for p in self._peers.values() if not p.busy), key=lambda p: p.due, default=None)
                if first is not None and first.due <= now:
                    first.busy = True
                    return first
                self._state.wait(None if first is None else first.due - now)
        return None

    def _serve(self, peer: _Peer) -> str:
        """Tell all that waits; what is wrong where there is no answer."""
        if (message := self._next_message(peer)) is None:
            return ""
        try:
            with self._caller.line(*peer.where) as line:
                while message is not None:
                    outcome = _tell(line, message)
                    with self._state:
                        then = self._take(peer, message) if message in peer.waiting else None
                    if then is not None:
                        then(outcome)
                    message = self._next_message(peer)
        except ChannelError as error:
            return str(error)
        return ""

    def _next_message(self, peer: _Peer) -> Release | None:
        """The first whose time is not up."""
        while True:
            with self._state:
                message, (until, _) = next(iter(peer.waiting.items()), (None, (0.0, None)))
                if message is None or self._closed or until > time.monotonic():
                    return None if self._closed else message
                then = self._take(peer, message)
            then(Outcome.UNREACHABLE)

    def _leave(self, peer: _Peer, problem: str) -> None:
        with self._state:
            peer.busy = False
            peer.pause = min(RETRY_MOST_S, peer.pause * 2 or RETRY_S) if problem else 0.0
            peer.due = time.monotonic() + peer.pause
            waiting = len(peer.waiting)
            if not waiting:
                del self._peers[peer.where]
            self._state.notify_all()
            tell = waiting and not self._closed and peer.where not in self._said
        if problem and tell:
            self._said.add([peer.where])
            logger.warning("kvpool: prefill is asked again to let go of %d offers that nobody fetches: %s", waiting, problem)


def _tell(line: Line, message: Release) -> Outcome:
    reply = line.ask(message, ANSWER_S)
    if isinstance(reply, Refused):
        raise ChannelError(reply.reason)
    return Outcome.RESTARTED if isinstance(reply, Gone) else Outcome.TOLD


def release_params(params: Mapping[str, object], secret: Secret, reason: str) -> bool:
    """The same at once, from ``kv_transfer_params`` that a prefill engine has returned: for proxies that do it by themselves. False
    where there was no answer within some seconds. OfferError where the params are none of prefill's."""
    offer, caller = read_offer(params, secret), Caller(secret.value)
    message = Release(offer.transfer_id, offer.instance, reason, force=True)
    try:
        for _ in range(2):
            try:
                with caller.line(offer.host, offer.port) as line:
                    _tell(line, message)
                    return True
            except ChannelError:
                continue
        return False
    finally:
        caller.close()
