"""Telling a prefill engine that nobody will read what it holds: for decode, and for proxies whose second leg never comes."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.transfer.channel import Caller, ChannelError
from kvpool.transfer.messages import Release
from kvpool.transfer.offer import Offer, read_offer
from kvpool.transfer.secret import Secret

ANSWER_S = 2.0


def release(caller: Caller, offer: Offer, reason: str, pull: str = "") -> bool:
    """``pull``: one that has failed and reads no more. False where prefill could not be told: it finds out by itself when
    its time is up."""
    for _ in range(2):
        try:
            with caller.line(offer.host, offer.port) as line:
                line.ask(Release(offer.transfer_id, offer.instance, reason, pull), ANSWER_S)
                return True
        except ChannelError:
            continue
    return False


def release_params(params: Mapping[str, object], secret: Secret, reason: str) -> bool:
    """The same from ``kv_transfer_params`` that a prefill engine has returned. OfferError where they are none of its."""
    offer, caller = read_offer(params, secret), Caller(secret.value)
    try:
        return release(caller, offer, reason)
    finally:
        caller.close()
