"""Where a decode engine's call meets the request that it belongs to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


class Pending:
    """A request that waits for the call of its decode engine; ``called`` gets what the engine sends."""

    def __init__(self, transfer_id: str, request_id: str) -> None:
        self.ids = (transfer_id, request_id)
        self.called: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()


class Rendezvous:
    """Both ids are 128 random bits of one attempt. Engines call with the transfer id where they know it, else with their own id, in
    which the request id stands ("cmpl-<id>-0", "chatcmpl-<id>")."""

    def __init__(self) -> None:
        self._waiting: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len({id(pending) for pending in self._waiting.values()})

    def expect(self, transfer_id: str, request_id: str) -> Pending:
        pending = Pending(transfer_id, request_id)
        self._waiting.update(dict.fromkeys(pending.ids, pending))
        return pending

    def forget(self, pending: Pending) -> None:
        pending.called.cancel()
        for name in pending.ids:
            self._waiting.pop(name, None)

    def arrive(self, params: Mapping[str, Any]) -> bool:
        """False for a call that belongs to nothing (any more). A second call for the same request changes nothing."""
        pending = next((self._waiting[name] for name in _names(params) if name in self._waiting), None)
        if pending is not None and not pending.called.done():
            pending.called.set_result(dict(params))
        return pending is not None


def _names(params: Mapping[str, Any]) -> list[str]:
    texts = [params.get("transfer_id"), params.get("request_id")]
    return [match.group() for text in texts if isinstance(text, str) and (match := _ID.search(text))]
