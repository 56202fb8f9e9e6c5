"""Telling a prefill engine that nobody will read what it holds: for decode, and for proxies whose second leg never comes."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.core.recent import RecentSet
from kvpool.transfer.channel import Caller, ChannelError
from kvpool.transfer.messages import Release
from kvpool.transfer.offer import Offer, read_offer
from kvpool.transfer.secret import Secret

ANSWER_S = 2.0
DEAD_S = 5.0


class Releaser:
    """Thread-safe. A prefill engine that does not answer is left alone for a while, so that others are told in time."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._dead = RecentSet(256, DEAD_S)

    def release(self, offer: Offer, reason: str, pull: str = "", force: bool = False) -> bool:
        """``pull``: one that has failed and reads no more; ``force``: nobody wants what is read of it. False where prefill could
        not be told: it finds out by itself when its time is up."""
        where = (offer.host, offer.port)
        if where in self._dead:
            return False
        for _ in range(2):
            try:
                with self._caller.line(*where) as line:
                    line.ask(Release(offer.transfer_id, offer.instance, reason, pull, force), ANSWER_S)
                    return True
            except ChannelError:
                continue
        self._dead.add([where])
        return False

    def close(self) -> None:
        self._caller.close()


def release_params(params: Mapping[str, object], secret: Secret, reason: str) -> bool:
    """The same from ``kv_transfer_params`` that a prefill engine has returned. OfferError where they are none of its."""
    offer, releaser = read_offer(params, secret), Releaser(Caller(secret.value))
    try:
        return releaser.release(offer, reason, force=True)
    finally:
        releaser.close()
