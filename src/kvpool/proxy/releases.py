"""Telling prefill that decode does not fetch what it keeps: its blocks are then free at once, not when their time is up.

Two cases. Prefill has answered with an offer, and the decode request has failed or nobody waits for it any more: the offer is
released. Or the prefill request has ended before its answer came: then it is released by the transfer id that the request carried,
wherever that engine is known to listen. Prefill remembers that, in case it has yet to finish the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvpool.options.addresses import is_loopback
from kvpool.proxy.logs import say
from kvpool.proxy.metrics import Metrics
from kvpool.proxy.prefill_listeners import PrefillListeners
from kvpool.proxy.table import Instance
from kvpool.transfer.channel import Caller
from kvpool.transfer.offer import Offer, OfferError, read_offer
from kvpool.transfer.release import Outcome, Releaser
from kvpool.transfer.secret import Secret, find_secret

CLOSE_S = 3.0
_THREADS = 4
_GONE = (Outcome.RESTARTED, Outcome.UNREACHABLE)


class Releases:
    """Its calls return at once; ``close`` waits a little for what can still be told. ``secret``: that of KVPOOL_SECRET."""

    def __init__(self, secret: bytes | None, metrics: Metrics) -> None:
        self._secret, self._metrics = secret, metrics
        self._secrets: dict[bool, Secret] = {}
        self._releasers: dict[bytes, Releaser] = {}
        self._warned = False
        metrics.releases_waiting.set_function(lambda: sum(one.backlog() for one in list(self._releasers.values())))

    def read(self, prefill: Instance, params: Mapping[str, object] | None) -> Offer | None:
        """The offer in the params of a prefill engine's answer. None where there is none, or none that we could release."""
        if not params or params.get("transfer_id") is None:
            return None
        try:
            offer = read_offer(params, self._secret_for(str(params.get("remote_host"))))
        except (OfferError, OSError) as error:
            if not self._warned:
                self._warned = True
                say("offers of prefill cannot be released early", logging.WARNING, prefill=str(prefill.address), reason=str(error))
            return None
        prefill.listeners.note(offer, prefill.starts)
        return offer

    def release(self, offer: Offer, reason: str) -> None:
        self._releaser_for(offer.host).release(offer, reason, force=True, then=self._count)

    def release_unseen(self, prefill: Instance, transfer_id: str) -> None:
        """What a prefill request may have left whose answer has not come: its time begins now at the earliest."""
        for known in prefill.listeners.offers():
            offer = replace(known, transfer_id=transfer_id, seen=time.monotonic())
            releaser, reason = self._releaser_for(offer.host), "its prefill request ended before it was answered"
            releaser.release(offer, reason, force=True, then=partial(self._ended_unseen, prefill.listeners, known))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(one.close, CLOSE_S) for one in self._releasers.values()))

    def _count(self, outcome: Outcome) -> None:
        self._metrics.releases.labels(outcome).inc()

    def _ended_unseen(self, listeners: PrefillListeners, known: Offer, outcome: Outcome) -> None:
        self._count(outcome)
        if outcome in _GONE:
            listeners.forget(known)

    def _releaser_for(self, host: str) -> Releaser:
        secret = self._secret_for(host).value
        if secret not in self._releasers:
            self._releasers[secret] = Releaser(Caller(secret), _THREADS)
        return self._releasers[secret]

    def _secret_for(self, host: str) -> Secret:
        """As the engine there found it."""
        near = is_loopback(host)
        if near not in self._secrets:
            self._secrets[near] = Secret(self._secret, "shared") if self._secret is not None else find_secret({}, host)
        return self._secrets[near]
