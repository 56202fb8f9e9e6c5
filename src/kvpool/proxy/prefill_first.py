"""Prefill computes the prompt and says where its KV is; decode fetches it and answers."""

from __future__ import annotations

from typing import Any

from kvpool.proxy.answers import Answer
from kvpool.proxy.failures import busy
from kvpool.proxy.flows import Flow
from kvpool.proxy.legs import NOT_READY_S, Try
from kvpool.proxy.table import Side

ASK_TO_KEEP: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PrefillFirst(Flow):
    async def once(self, attempt: Try) -> Answer:
        if attempt.unit.direct:
            return await self.legs.decode(attempt, None, lambda: None)
        if not self.legs.table.ready(Side.DECODE):  # before prefill keeps KV that nobody will fetch
            raise busy(503, f"no {Side.DECODE} instance is ready", NOT_READY_S)
        prefilled = await self.legs.prefill(attempt, {**ASK_TO_KEEP, "transfer_id": attempt.transfer_id})
        try:
            answer = await self.legs.decode(attempt, prefilled.params, lambda: prefilled.cached)
        except BaseException:  # also where the client has gone
            if prefilled.offer is not None:
                self.legs.releases.release(prefilled.offer, "its decode request has ended")
            raise
        prefilled.claim.release()  # the first byte has come: decode has the KV
        return answer
