"""MooncakeConnectorV1 in the scheduler of decode: matches requests that carry an offer, and has their KV pulled."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.engine.log_gate import LogGate
from kvpool.engine.p2p.messages import PullJob, TransferMetadata
from kvpool.engine.p2p.prompt import prompt_digest
from kvpool.engine.p2p.setup import PullSetup
from kvpool.engine.threads import WorkerThreads
from kvpool.transfer.channel import Caller
from kvpool.transfer.offer import Offer, OfferError, read_offer
from kvpool.transfer.pull import Wanted
from kvpool.transfer.release import release

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")


class Phase(enum.Enum):
    OFFERED = "offered"  # nothing has been done with the offer
    PULLING = "pulling"
    OVER = "over"  # pulled, failed, or not needed: never asked for again


@dataclass
class Arrival:
    """A request with an offer, while it lives."""

    request: Request
    offer: Offer
    prompt: str
    phase: Phase = Phase.OFFERED
    computed: int = 0  # tokens the engine held by itself when it last asked


class DecodeSide:
    """Runs in the engine's thread; messages to prefill are sent by another."""

    def __init__(self, setup: PullSetup, probe: Callable[[], str]) -> None:
        self._setup = setup
        self._probe = probe
        self._arrivals: dict[str, Arrival] = {}
        self._pulls: list[PullJob] = []
        self._caller = Caller(setup.secret.value)
        self._releases = WorkerThreads("release", 2)
        self._log = LogGate()

    # ---- requests -----------------------------------------------------------------------------------------------------------

    def greet(self, request: Request) -> None:
        """A request has come. Params that are no offer we trust are as if they were not there: it is computed here."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        try:
            offer = read_offer(params, self._setup.secret)
        except OfferError as error:
            self._warn(request, str(error))
            return
        prompt = prompt_digest(request, self._setup.unit)
        if prompt is None or offer.tokens != request.num_prompt_tokens:
            self._warn(request, f"the offer is of a prompt of {offer.tokens} tokens, not of these {request.num_prompt_tokens}")
            self._release(offer, "decode has another prompt")
            return
        self._drop(self._arrivals.get(request.request_id), "its request id was used again")
        self._arrivals[request.request_id] = Arrival(request, offer, prompt)

    def _warn(self, request: Request, problem: str) -> None:
        more = self._log.ask("offer")
        if more is not None:
            logger.warning("kvpool: request %s is computed here: %s%s", request.request_id, problem, more)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """All of the prompt but its last token, which decode computes to sample from; always asynchronous. No side effect."""
        arrival = self._arrival(request)
        if arrival is None or arrival.phase is not Phase.OFFERED:
            return 0, False
        arrival.computed = computed
        tokens = max(0, request.num_prompt_tokens - 1 - computed)
        return tokens, tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        arrival = self._arrival(request)
        if arrival is None or arrival.phase is not Phase.OFFERED:
            return
        if tokens <= 0:
            self._drop(arrival, "decode did not need it")
            return
        end, wanted = arrival.computed + tokens, []
        for index, (group, table) in enumerate(zip(self._setup.groups, blocks.get_block_ids(), strict=True)):
            first, last = arrival.computed // group.block_size, -(-end // group.block_size)
            places = [i for i in range(first, min(last, len(table))) if table[i] != 0]
            wanted.append(Wanted(index, places, [table[i] for i in places]))
        arrival.phase = Phase.PULLING
        self._pulls.append(PullJob(request.request_id, arrival.offer, arrival.prompt, tuple(wanted)))

    def finished(self, request: Request) -> None:
        """Idempotent. A pull that is under way ends by itself and tells prefill."""
        arrival = self._arrival(request)
        if arrival is not None:
            del self._arrivals[request.request_id]
            self._drop(arrival, "its request ended on decode before it was read")

    def _arrival(self, request: Request) -> Arrival | None:
        arrival = self._arrivals.get(request.request_id)
        return arrival if arrival is not None and arrival.request is request else None

    def _drop(self, arrival: Arrival | None, reason: str) -> None:
        """Prefill need not keep an offer that nobody will read."""
        if arrival is not None and arrival.phase is Phase.OFFERED:
            arrival.phase = Phase.OVER
            self._release(arrival.offer, reason)

    def _release(self, offer: Offer, reason: str) -> None:
        self._releases.submit(lambda: release(self._caller, offer, reason))

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def plan_step(self) -> TransferMetadata:
        pulls, self._pulls = self._pulls, []
        return TransferMetadata(probe=self._probe() if pulls else "", pulls=pulls)

    def update(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving or ():
            arrival = self._arrivals.get(request_id)
            if arrival is not None and arrival.phase is Phase.PULLING:
                arrival.phase = Phase.OVER

    def open_counts(self) -> dict[str, int]:
        """Sizes of all tables: every one is 0 when the engine is idle."""
        return {"arrivals": len(self._arrivals), "pulls": len(self._pulls), "releases": self._releases.backlog()}

    def shutdown(self) -> None:
        self._releases.close(2.0)
        self._caller.close()
