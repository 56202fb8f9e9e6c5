"""Administration at run time: which instances there are, adding and removing them, emptying their prefix caches.

Open without a token on loopback only; with KVPOOL_ADMIN_TOKEN everywhere, to those who send it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.options.errors import OptionError, shown
from kvpool.proxy.addresses import Address, read_address
from kvpool.proxy.failures import FailureError, UnreachableError
from kvpool.proxy.flags import ADMIN_TOKEN
from kvpool.proxy.logs import say
from kvpool.proxy.options import ProxyOptions
from kvpool.proxy.replies import failure_reply, json_reply, read_json
from kvpool.proxy.table import Instance, Side, Table
from kvpool.proxy.upstream import Upstream

MAX_BODY = 1 << 20
RESET_S = 30.0
Handler = Callable[[Request], Awaitable[Response]]


class Admin:
    def __init__(self, table: Table, upstream: Upstream, options: ProxyOptions) -> None:
        self._table, self._upstream, self._options = table, upstream, options

    def routes(self) -> list[Route]:
        return [
            Route("/instances", self._guarded(self._list), methods=["GET"]),
            Route("/instances/add", self._guarded(self._add), methods=["POST"]),
            Route("/instances/remove", self._guarded(self._remove), methods=["POST"]),
            Route("/reset_prefix_cache", self._guarded(self._reset), methods=["POST"]),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._let_in(request)
                return await handler(request)
            except FailureError as failure:
                return failure_reply(failure)

        return guarded

    def _let_in(self, request: Request) -> None:
        token, sent = self._options.admin_token, request.headers.get("authorization", "")
        if token is None and not self._options.admin_open:
            raise FailureError(403, f"administration is closed: {self._options.host} is not loopback and {ADMIN_TOKEN} is not set")
        if token is not None and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            raise FailureError(401, f"the bearer token is not {ADMIN_TOKEN}")
        if token is None and "origin" in request.headers:
            raise FailureError(403, f"web pages administrate with {ADMIN_TOKEN} only")

    async def _list(self, request: Request) -> Response:
        return json_reply({"instances": [_shown(one) for one in self._table.instances()]})

    async def _add(self, request: Request) -> Response:
        side, addresses = await self._named(request)
        new = [str(one) for one in addresses if self._table.add(side, one, self._options.give_up_s)]
        say("instances added", side=side, instances=new)
        known = [str(one) for one in addresses if str(one) not in new]
        return json_reply({"waiting": new, "known": known, "give_up_seconds": self._options.give_up_s}, 202 if new else 200)

    async def _remove(self, request: Request) -> Response:
        """Running requests finish; there are no new ones."""
        side, addresses = await self._named(request)
        found = {str(one): self._table.drain(side, one, self._options.deadlines.drain) for one in addresses}
        say("instances removed", side=side, instances=[name for name, one in found.items() if one is not None])
        draining = {name: one.requests for name, one in found.items() if one is not None and not one.idle}
        gone = [name for name, one in found.items() if one is not None and one.idle]
        unknown = [name for name, one in found.items() if one is None]
        return json_reply({"removed": gone, "draining": draining, "unknown": unknown}, 404 if len(unknown) == len(found) else 200)

    async def _named(self, request: Request) -> tuple[Side, list[Address]]:
        """{"type": "prefill" | "decode", "instances": "host:port" or a list of them}"""
        _, body = await read_json(request, MAX_BODY)
        kind, given = body.get("type"), body.get("instances")
        try:
            side = Side(str(kind))
        except ValueError:
            raise FailureError(400, f'type={shown(kind)}: accepted: "{Side.PREFILL}" or "{Side.DECODE}"') from None
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list) or not listed:
            raise FailureError(400, f'instances={shown(given)}: accepted: "<host>:<port>" or a list of such')
        try:
            return side, list(dict.fromkeys(read_address("instances", one) for one in listed))
        except OptionError as error:
            raise FailureError(400, str(error)) from None

    async def _reset(self, request: Request) -> Response:
        """On all instances at once, with the query as it came; 500 with those that did not do it."""
        query = f"?{request.url.query}" if request.url.query else ""
        instances = self._table.instances()
        results = await asyncio.gather(*(self._reset_one(one, query) for one in instances))
        failed = {f"{one.side} {one.address}": text for one, text in zip(instances, results, strict=True) if text is not None}
        say("prefix caches reset", logging.WARNING if failed else logging.INFO, instances=len(instances), failed=len(failed))
        return json_reply({"success": not failed, "instances": len(instances), "failed": failed}, 500 if failed else 200)

    async def _reset_one(self, instance: Instance, query: str) -> str | None:
        headers = {} if self._options.api_key is None else {"authorization": f"Bearer {self._options.api_key}"}
        try:
            reply = await self._upstream.ask(instance, "POST", f"/reset_prefix_cache{query}", RESET_S, b"", headers)
            try:
                body = await reply.body(RESET_S)
            finally:
                reply.close()
        except (UnreachableError, FailureError) as error:
            return str(error)
        if reply.status != 200:
            return f"answered {reply.status}"
        return "answered success: false" if _says_no(body) else None


def _says_no(body: bytes) -> bool:
    try:
        answer: Any = json.loads(body or b"null")
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False


def _shown(one: Instance) -> dict[str, Any]:
    return {
        "type": str(one.side),
        "instance": str(one.address),
        "state": str(one.state),
        "requests": one.requests,
        "active_tokens": one.active,
        "held_tokens": one.held,
    }
