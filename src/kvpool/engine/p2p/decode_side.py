"""MooncakeConnectorV1 in the scheduler of decode: matches requests that carry an offer, and has their KV pulled."""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.core.recent import RecentSet
from kvpool.engine.log_gate import LogGate
from kvpool.engine.p2p.messages import PullJob, TransferMetadata
from kvpool.engine.p2p.prompt import prompt_digest
from kvpool.engine.p2p.setup import PullSetup
from kvpool.engine.p2p.stats import TransferStats
from kvpool.engine.stats import labelled
from kvpool.transfer.channel import Caller
from kvpool.transfer.offer import Offer, OfferError, read_offer
from kvpool.transfer.pull import Wanted
from kvpool.transfer.release import Outcome, Releaser

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")


USED = 65536
USED_S = 3600.0
CLOSE_S = 2.0


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
    """Runs in the engine's thread; messages to prefill are sent by others."""

    def __init__(self, setup: PullSetup, probe: Callable[[], str]) -> None:
        self._setup = setup
        self._probe = probe
        self._arrivals: dict[str, Arrival] = {}
        self._sharers: dict[str, list[Arrival]] = {}  # transfer id -> requests with that offer
        self._used = RecentSet(USED, USED_S)  # transfers that have been pulled: they cannot be pulled twice
        self._pulls: list[PullJob] = []
        self._pulling: dict[str, PullJob] = {}  # by request, until all ranks have returned
        self._releaser = Releaser(Caller(setup.secret.value), threads=2)
        self._lock = threading.Lock()
        self._stats = TransferStats()
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
            if offer.transfer_id not in self._used and offer.transfer_id not in self._sharers:  # else somebody is to pull it
                self._release(offer, "decode has another prompt")
            return
        self._forget(self._arrivals.get(request.request_id), "its request id was used again")
        arrival = self._arrivals[request.request_id] = Arrival(request, offer, prompt)
        self._sharers.setdefault(offer.transfer_id, []).append(arrival)

    def _warn(self, request: Request, problem: str) -> None:
        more = self._log.ask("offer")
        if more is not None:
            logger.warning("kvpool: request %s is computed here: %s%s", request.request_id, problem, more)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """All of the prompt but its last token, which decode computes to sample from; always asynchronous.

        Requests with one and the same offer (``n`` answers to a prompt) are asked again until the first of them has its KV; they
        then find it in the engine's own prefix cache.
        """
        arrival = self._arrival(request)
        if arrival is None or arrival.phase is not Phase.OFFERED:
            return 0, False
        if any(other.phase is Phase.PULLING for other in self._sharing(arrival)):
            return None, False
        if arrival.offer.transfer_id in self._used:
            arrival.phase = Phase.OVER
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
        self._used.add([arrival.offer.transfer_id])
        pull = secrets.token_hex(16)
        job = PullJob(request.request_id, arrival.offer, pull, arrival.prompt, tuple(wanted))
        self._pulls.append(job)
        self._pulling[request.request_id] = job

    def finished(self, request: Request) -> None:
        """Idempotent. A pull that is under way ends by itself and tells prefill."""
        self._forget(self._arrival(request), "its request ended on decode before it was read")

    def _arrival(self, request: Request) -> Arrival | None:
        arrival = self._arrivals.get(request.request_id)
        return arrival if arrival is not None and arrival.request is request else None

    def _forget(self, arrival: Arrival | None, reason: str) -> None:
        if arrival is None:
            return
        self._drop(arrival, reason)
        del self._arrivals[arrival.request.request_id]
        sharers = self._sharers[arrival.offer.transfer_id]
        sharers.remove(arrival)
        if not sharers:
            del self._sharers[arrival.offer.transfer_id]

    def _drop(self, arrival: Arrival, reason: str) -> None:
        """Prefill need not keep an offer that nobody will read."""
        if arrival.phase is not Phase.OFFERED:
            return
        arrival.phase = Phase.OVER
        if arrival.offer.transfer_id not in self._used and all(o.phase is Phase.OVER for o in self._sharing(arrival)):
            self._release(arrival.offer, reason)

    def _sharing(self, arrival: Arrival) -> list[Arrival]:
        """The other requests with the same offer."""
        return [other for other in self._sharers[arrival.offer.transfer_id] if other is not arrival]

    def _release(self, offer: Offer, reason: str, pull: str = "") -> None:
        self._releaser.release(offer, reason, pull, then=self._released)

    def _released(self, outcome: Outcome) -> None:
        with self._lock:
            self._stats.add(labelled("releases", reason=outcome))

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def plan_step(self) -> TransferMetadata:
        pulls, self._pulls = self._pulls, []
        return TransferMetadata(probe=self._probe() if pulls else "", pulls=pulls)

    def update(self, output: KVConnectorOutput) -> None:
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            job = self._pulling.pop(request_id, None)
            if job is not None and request_id in failed:  # ranks may have begun that never ended
                self._release(job.offer, "its pull failed on decode", job.pull)
            arrival = self._arrivals.get(request_id)
            if arrival is not None and arrival.phase is Phase.PULLING:
                arrival.phase = Phase.OVER

    def open_counts(self) -> dict[str, int]:
        """Sizes of all tables: every one is 0 when the engine is idle."""
        return {
            "arrivals": len(self._arrivals),
            "sharers": len(self._sharers),
            "pulls": len(self._pulls),
            "pulling": len(self._pulling),
            "releases": self._releaser.backlog(),
        }

    def take_stats(self) -> TransferStats | None:
        with self._lock:
            taken, self._stats = self._stats, TransferStats()
        return None if taken.is_empty() else taken

    def shutdown(self) -> None:
        self._releaser.close(CLOSE_S)
