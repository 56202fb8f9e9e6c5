"""One request to one side: an instance is chosen, another one while nothing could be sent; the load is given back at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.core.signed_fields import sign_fields
from kvpool.proxy import asks, usage
from kvpool.proxy.addresses import Address
from kvpool.proxy.answers import Answer, Cached, answer_of
from kvpool.proxy.asks import Ask, Unit
from kvpool.proxy.failures import FailureError, UnreachableError, busy
from kvpool.proxy.metrics import Metrics
from kvpool.proxy.options import ProxyOptions
from kvpool.proxy.releases import Releases
from kvpool.proxy.table import Claim, Instance, NoInstanceError, Side, Table
from kvpool.proxy.upstream import Reply, Upstream
from kvpool.transfer.offer import Offer

NOT_READY_S = 5  # when to come back


@dataclass(slots=True)
class Prefilled:
    """``params``: where the KV is, None where prefill keeps none; ``offer``: what can be released of it. ``cached``: prompt tokens
    that it did not have to compute. ``claim``: what it holds until decode has the KV."""

    params: dict[str, Any] | None
    offer: Offer | None
    cached: int
    claim: Claim


@dataclass(slots=True)
class Try:
    """One attempt to serve a unit. Its ids are its own; ``without``: who has failed the unit before. ``unanswered``: the prefill
    engine that may have computed the prompt without our knowing."""

    ask: Ask
    unit: Unit
    stack: AsyncExitStack
    without: set[Address]
    request_id: str
    transfer_id: str
    unanswered: Instance | None = None


class Legs:
    def __init__(self, table: Table, upstream: Upstream, options: ProxyOptions, metrics: Metrics, releases: Releases) -> None:
        self.table, self.options, self.releases = table, options, releases
        self._upstream, self._metrics = upstream, metrics

    def signed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """With the signature of those that share the secret, where there is one."""
        return dict(params) if self.options.secret is None else sign_fields(self.options.secret, params)

    async def prefill(self, attempt: Try, params: Mapping[str, Any]) -> Prefilled:
        """Compute the prompt. FailureError where that fails."""
        body = asks.prefill_body(attempt.unit, attempt.ask.path, self.signed(params))
        limit = self.options.deadlines.prefill
        try:
            with self._metrics.prefill_seconds.time():
                claim, reply = await self._send(Side.PREFILL, attempt, body, limit)
                if reply.status != 200:
                    attempt.unanswered = None
                    raise await reply.refused(limit)
                raw = await reply.body(limit)
        except BaseException:
            if attempt.unanswered is not None:
                self.releases.release_unseen(attempt.unanswered, attempt.transfer_id)
            raise
        try:
            answer = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise reply.failure(502, "answered no JSON object", again=True)
        found = answer.get("kv_transfer_params")
        where = found if isinstance(found, dict) else None
        claim.hold()
        offer = self.releases.read(claim.instance, where)
        return Prefilled(where, offer, usage.cached_tokens(answer) or 0, claim)

    async def decode(self, attempt: Try, params: Mapping[str, Any] | None, cached: Cached) -> Answer:
        """Answer, with the KV that ``params`` lead to. FailureError where that fails before the first byte."""
        deadlines, stream = self.options.deadlines, attempt.ask.stream
        body = asks.decode_body(attempt.unit, params)
        claim, reply = await self._send(Side.DECODE, attempt, body, deadlines.first_byte if stream else deadlines.request)
        return await answer_of(reply, claim, stream, deadlines, cached)

    async def _send(self, side: Side, attempt: Try, body: dict[str, Any], deadline_s: float) -> tuple[Claim, Reply]:
        limits, unit = self.options.limits, attempt.unit
        headers = {**attempt.ask.headers, "x-request-id": attempt.request_id}
        if self.options.api_key is not None:
            headers.setdefault("authorization", f"Bearer {self.options.api_key}")
        failed = set(attempt.without)
        for number in range(limits.retries + 1):
            try:
                claim = self.table.claim(side, unit.tokens, unit.prefix, failed)
            except NoInstanceError as error:
                raise busy(503, str(error), NOT_READY_S) from None
            attempt.ask.trail[str(side)] = str(claim.instance.address)
            attempt.unanswered = claim.instance if side is Side.PREFILL else None
            try:
                reply = await self._upstream.post(claim.instance, attempt.ask.path, body, headers, deadline_s)
            except UnreachableError as error:
                attempt.unanswered = None
                self.table.report(claim.instance, False)
                claim.release()
                failed.add(claim.instance.address)
                self._metrics.retries.labels(side).inc()
                if number == limits.retries:
                    raise FailureError(502, str(error)) from None
                await asyncio.sleep(limits.retry_delay_s * 2**number)
            except BaseException:
                claim.release()
                raise
            else:
                attempt.stack.callback(claim.release)
                attempt.stack.callback(reply.close)
                return claim, reply
        raise AssertionError("unreachable")
