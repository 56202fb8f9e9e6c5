"""Telling prefill that decode does not fetch what it keeps: its blocks are then free at once, not when their time is up.

Two cases. Prefill has answered with an offer, and the decode request has failed or nobody waits for it any more: the offer is
released. Or the prefill request has ended before its answer came: then it is released by the transfer id that the request carried,
at every listener from which that engine has offered before. Prefill remembers that, in case it has yet to finish the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvpool.proxy.addresses import Address
from kvpool.proxy.logs import say
from kvpool.proxy.metrics import Metrics
from kvpool.transfer.channel import Caller
from kvpool.transfer.offer import Offer, OfferError, read_offer
from kvpool.transfer.release import Releaser
from kvpool.transfer.secret import Secret, find_secret, is_loopback

CLOSE_S = 3.0
_THREADS = 4
_LISTENERS = 256  # of one engine: one for each data-parallel rank, and those from before it was started anew


class Releases:
    """Its calls return at once; ``close`` waits a little for what is under way. ``secret``: that of KVPOOL_SECRET."""

    def __init__(self, secret: bytes | None, metrics: Metrics) -> None:
        self._secret, self._metrics = secret, metrics
        self._secrets: dict[bool, Secret] = {}
        self._releasers: dict[bytes, Releaser] = {}
        self._listeners: dict[Address, dict[tuple[str, int], Offer]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "kvpool-release")
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = False

    def read(self, prefill: Address, params: Mapping[str, object] | None) -> Offer | None:
        """The offer in the params of a prefill engine's answer. None where there is none, or none that we could release."""
        if not params or params.get("transfer_id") is None:
            return None
        try:
            offer = read_offer(params, self._secret_for(str(params.get("remote_host"))))
        except (OfferError, OSError) as error:
            if not self._warned:
                self._warned = True
                say("offers of prefill cannot be released early", logging.WARNING, prefill=str(prefill), reason=str(error))
            return None
        known = self._listeners.setdefault(prefill, {})
        known[offer.host, offer.port] = offer
        if len(known) > _LISTENERS:
            del known[next(iter(known))]
        return offer

    def release(self, offer: Offer, reason: str) -> None:
        self._start(self._tell(offer, reason))

    def release_unseen(self, prefill: Address, transfer_id: str) -> None:
        """What a prefill request may have left whose answer has not come."""
        for offer in list(self._listeners.get(prefill, {}).values()):
            mine = replace(offer, transfer_id=transfer_id)
            self._start(self._tell(mine, "its prefill request ended before it was answered"))

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for releaser in self._releasers.values():
            releaser.close()

    def _start(self, telling: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, offer: Offer, reason: str) -> None:
        secret = self._secret_for(offer.host).value
        if secret not in self._releasers:
            self._releasers[secret] = Releaser(Caller(secret))
        releaser = self._releasers[secret]
        loop = asyncio.get_running_loop()
        told = await loop.run_in_executor(self._threads, lambda: releaser.release(offer, reason, force=True))
        self._metrics.releases.labels("told" if told else "unreachable").inc()

    def _secret_for(self, host: str) -> Secret:
        """As the engine there found it."""
        near = is_loopback(host)
        if near not in self._secrets:
            self._secrets[near] = Secret(self._secret, "shared") if self._secret is not None else find_secret({}, host)
        return self._secrets[near]
