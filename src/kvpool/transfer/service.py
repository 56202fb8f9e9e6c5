"""Prefill's answers on the channel: who may read, what, and whether it was held. Pure but for the ledger it keeps."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping

from kvpool.core.namespace import differing_fields
from kvpool.options.errors import shown
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import (
    Begin,
    End,
    Gone,
    Held,
    Hello,
    RankLayout,
    Ready,
    Refused,
    Release,
    Reply,
    Request,
    Wait,
    Welcome,
)

logger = logging.getLogger(__name__)

SHOWN_BYTES = 400


class TransferService:
    """``record`` and ``ranks`` are set once the engine's workers have introduced themselves; until then decode is told to wait."""

    def __init__(self, ledger: Ledger, readers: int, engine: str, pool: Mapping[str, str]) -> None:
        self.instance = secrets.token_hex(8)
        self.record = ""
        self.ranks: tuple[RankLayout, ...] = ()
        self._ledger = ledger
        self._readers = readers
        self._engine = engine
        self._pool = dict(pool)
        self._warned: set[str] = set()

    def answer(self, request: Request) -> Reply:
        """In the channel's thread."""
        if isinstance(request, Hello):
            return self._meet(request)
        if request.instance != self.instance:
            return Gone("the prefill engine has restarted since")
        if isinstance(request, Begin):
            found = self._ledger.begin(request.transfer_id, request.pull, request.reader, request.prompt)
            return Gone(found) if isinstance(found, str) else Wait() if found is None else Ready(found)
        if isinstance(request, End):
            lost = self._ledger.end(request.transfer_id, request.pull, request.reader)
            return Gone(lost) if lost else Held()
        assert isinstance(request, Release)
        self._ledger.release(request.transfer_id, request.reason[:SHOWN_BYTES], request.pull, request.force)
        return Held()

    def _meet(self, hello: Hello) -> Reply:
        if not self.record:
            return Wait()
        reason = disagreement(self.record, hello.record)
        if not reason and hello.engine != self._engine:
            reason = f"transfer_engine: {self._engine} on prefill, {hello.engine} on decode"
        if not reason and hello.readers != self._readers:
            reason = f"decode.tp_size: {self._readers} in prefill's configuration, but decode runs with {hello.readers}"
        if reason:
            if reason not in self._warned and len(self._warned) < 64:
                self._warned.add(reason)
                logger.error("kvpool: a decode engine was refused: %s", reason)
            return Refused(reason)
        return Welcome(self.instance, self.ranks, self._pool)


def disagreement(prefill: str, decode: str) -> str:
    """In which fields two namespace records differ, with both values; "" where they do not."""
    if prefill == decode:
        return ""
    fields = differing_fields(prefill, decode)
    if not fields:
        return "one of the two namespace records cannot be read"
    values = (f"{name}: {shown(theirs)} on prefill, {shown(ours)} on decode" for name, (theirs, ours) in fields.items())
    return f"KV of different kinds ({'; '.join(values)})"


def pool_differences(prefill: Mapping[str, str], decode: Mapping[str, str]) -> list[str]:
    """What is said where both sides have a pool beside the transfer, and it is not the same one."""
    if not prefill or not decode:
        return []
    names = [name for name in ("backend", "address", "tenant") if prefill.get(name) != decode.get(name)]
    return [f"pool {name}: {prefill.get(name)!r} on prefill, {decode.get(name)!r} on decode" for name in names]
