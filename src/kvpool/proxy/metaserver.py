"""The listener that decode engines call, apart from the one for clients: POST /v1/metaserver."""

from __future__ import annotations

import asyncio
import logging

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.core.signed_fields import SIGNATURE, verify_fields
from kvpool.proxy.failures import FailureError
from kvpool.proxy.logs import say
from kvpool.proxy.rendezvous import Rendezvous
from kvpool.proxy.replies import failure_reply, json_reply, read_json

PATH = "/v1/metaserver"
MAX_BODY = 1 << 20
BODY_S = 10.0


def metaserver(rendezvous: Rendezvous, secret: bytes | None) -> Starlette:
    """202: prefill is on its way (its failure ends the decode request); 404: nobody waits for this; 401: not signed."""

    async def called(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_S):
                _, params = await read_json(request, MAX_BODY)
            if secret is not None and not verify_fields(secret, params):
                raise FailureError(401, "the signature is missing, wrong or too old")
            params.pop(SIGNATURE, None)
            if not rendezvous.arrive(params):
                raise FailureError(404, "no request waits for this call")
        except TimeoutError:
            return failure_reply(FailureError(408, f"the body did not come within {BODY_S:g} s"))
        except ClientDisconnect:
            return Response(status_code=400)
        except FailureError as failure:
            say("metaserver call refused", logging.WARNING, status=failure.status, reason=str(failure))
            return failure_reply(failure)
        return json_reply({"status": "accepted"}, 202)

    return Starlette(routes=[Route(PATH, called, methods=["POST"])])
