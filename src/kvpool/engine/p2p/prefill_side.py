"""MooncakeConnectorV1 in the scheduler of prefill: offers what finished requests leave, and keeps it until it is read.

Blocks are pinned in vLLM's block pool by transfer, so nothing is delayed or reported through vLLM. With an engine that decode reads
one-sidedly they stay pinned until every reader has ended; with a staged one only until the workers have copied them.
What has ended meanwhile is unpinned when the engine next does anything: an idle one needs no blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpool.core.signed_fields import verify_fields
from kvpool.engine.agreement import Agreement
from kvpool.engine.log_gate import LogGate
from kvpool.engine.p2p.messages import PublishJob, TransferMetadata, TransferReport
from kvpool.engine.p2p.prompt import prompt_digest
from kvpool.engine.p2p.setup import PullSetup
from kvpool.engine.p2p.stats import TransferStats
from kvpool.engine.pins import BlockPins
from kvpool.engine.setup import host_identity
from kvpool.engine.stats import labelled
from kvpool.options.secret import SECRET_VARIABLE
from kvpool.transfer import build_engine
from kvpool.transfer.base import StagedEngine
from kvpool.transfer.channel import Responder
from kvpool.transfer.ledger import Ledger
from kvpool.transfer.messages import RankLayout
from kvpool.transfer.offer import Offer, is_transfer_id
from kvpool.transfer.service import TransferService

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")

FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Sending:
    """One transfer here. It is over when it has ended for decode and no rank copies any more."""

    job_id: int
    tables: tuple[tuple[int, ...], ...]
    copying: int  # ranks that have not reported their copy
    until: float  # time.monotonic(); the ledger ends it by then, and ranks that have not reported are not waited for
    pinned: bool = True
    ended: bool = False
    failure: str = ""


class PrefillSide:
    """Runs in the engine's thread; the channel's thread touches the ledger only. RuntimeError where ``kv_port`` is taken."""

    def __init__(self, setup: PullSetup, probe: Callable[[], str]) -> None:
        self._setup = setup
        self._agreement = Agreement(setup.world_size, len(setup.groups), probe, host_identity(), host_bound=False)
        self._layouts: dict[int, RankLayout] = {}
        self._ledger = Ledger(setup.options.decode.tp_size, setup.hold_s)
        self._service = TransferService(self._ledger, setup.options.decode.tp_size, setup.engine, setup.pool)
        self._staged = isinstance(build_engine(setup.engine, setup.engine_settings("cpu")), StagedEngine)
        self._sendings: dict[str, Sending] = {}
        self._publishes: list[PublishJob] = []
        self._jobs = 0
        self._withdraws: list[str] = []
        self._log = LogGate()
        self._stats = TransferStats()
        self._told_gauges: dict[str, float] = {}
        try:
            self._responder = Responder(setup.host, setup.port, setup.secret.value, self._service.answer)
        except OSError as error:
            raise RuntimeError(f"kvpool: kv_port {setup.port}: {error}") from None

    # ---- set-up -------------------------------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        self._pins = BlockPins(manager.block_pool, manager.block_pool.num_gpu_blocks)
        reset = manager.reset_prefix_cache

        def reset_unpinned() -> bool:
            self.sweep()
            return self._pins.lifted(reset)  # pinned blocks are not handed out, they need not hold up a reset

        manager.reset_prefix_cache = reset_unpinned  # type: ignore[method-assign]

    def update(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if not isinstance(report, TransferReport):
            return
        for one in report.introductions:
            if one.layout.rank not in self._layouts:
                self._layouts[one.layout.rank] = one.layout
                self._agreement.add(one.info)
                self._introduce()
        for transfer_id, outcomes in report.published.items():
            self._copied(transfer_id, outcomes)

    def _introduce(self) -> None:
        """Once all ranks have reported, which may be after the first offer: until then decode is told to wait."""
        if self._agreement.settle() and self._agreement.inputs is not None:
            self._service.ranks = tuple(self._layouts[rank] for rank in sorted(self._layouts))
            self._service.record = self._agreement.inputs.to_json()

    # ---- transfers ----------------------------------------------------------------------------------------------------------

    def greet(self, request: Request) -> None:
        """A request has come. Anybody may put params into it: where there is a secret, only who knows it makes us keep KV."""
        self.sweep()
        params, secret = request.kv_transfer_params, self._setup.secret
        if secret.kind != "shared" or not params or not params.get("do_remote_decode") or verify_fields(secret.value, params):
            return
        request.kv_transfer_params = None
        self._stats.add(labelled("withheld_offers", reason="unsigned"))
        if (more := self._log.ask("unsigned")) is not None:
            logger.warning(
                "kvpool: request %s asks us to keep its KV, but the signature of its kv_transfer_params is missing, wrong or too "
                "old: it is only computed. With %s, send requests through a proxy that has the same%s",
                request.request_id,
                SECRET_VARIABLE,
                more,
            )

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The params of the answer, where the request asked for a transfer and its prompt has been computed."""
        self.sweep()
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or request.status not in FINISHED:
            return None
        prompt = prompt_digest(request, self._setup.unit)
        tokens = request.num_prompt_tokens
        problem = "its prompt is not made of tokens" if prompt is None else ""
        tables = tuple(
            tuple(ids[: -(-tokens // group.block_size)]) for ids, group in zip(block_ids, self._setup.groups, strict=True)
        )
        if not any(map(any, tables)) or request.num_computed_tokens < tokens:
            problem = "its prompt was not computed to the end"
        if problem or prompt is None:
            logger.warning("kvpool: request %s is not offered to decode: %s", request.request_id, problem)
            return None
        if self._pins.total > self._setup.num_blocks // 2:
            self._stats.add(labelled("withheld_offers", reason="blocks"))
            if (more := self._log.ask("withheld")) is not None:
                logger.warning(
                    "kvpool: request %s is not offered: %d of %d blocks are held for decode already, so it computes by itself%s",
                    request.request_id,
                    self._pins.total,
                    self._setup.num_blocks,
                    more,
                )
            return None
        return self._offer(request, params.get("transfer_id"), prompt, tables)

    def _offer(self, request: Request, asked: object, prompt: str, tables: tuple[tuple[int, ...], ...]) -> dict[str, Any] | None:
        """``asked``: the id that the proxy has thought of, by which it can release an offer that it has never seen; None where it
        has done so already."""
        setup = self._setup
        transfer_id = str(asked) if is_transfer_id(asked) and not self._ledger.knows(str(asked)) else secrets.token_hex(16)
        if not self._ledger.open(transfer_id, prompt, tables, self._staged):
            self._stats.add(labelled("withheld_offers", reason="released"))
            return None
        self._jobs += 1
        self._stats.add("offers")
        self._pins.pin(self._jobs, [block for table in tables for block in table if block], saving=False)
        until = time.monotonic() + setup.hold_s
        self._sendings[transfer_id] = Sending(self._jobs, tables, setup.world_size if self._staged else 0, until)
        if self._staged:
            self._publishes.append(PublishJob(transfer_id, tables))
        logger.debug("kvpool: transfer %s: request %s is offered", transfer_id, request.request_id)
        offer = Offer(transfer_id, self._service.instance, setup.host, setup.port, request.num_prompt_tokens, setup.hold_s)
        return offer.to_params(setup.secret, setup.engine_id, request.request_id, tables)

    def _copied(self, transfer_id: str, outcomes: Sequence[str]) -> None:
        sending = self._sendings.get(transfer_id)
        if sending is None:
            return
        sending.copying -= len(outcomes)
        sending.failure = next(filter(None, (sending.failure, *outcomes)), "")
        if sending.copying <= 0:
            logger.debug("kvpool: transfer %s: copied by all ranks %s", transfer_id, sending.failure)
            self._unpin(sending)
            self._ledger.published(transfer_id, sending.failure)
            self._finish(transfer_id, sending)

    def sweep(self) -> None:
        """Let go of what has ended since the last time."""
        for closed in self._ledger.take_closed():
            sending = self._sendings.get(closed.transfer_id)
            if closed.reason:
                unpublished = sending is not None and sending.failure
                reason = "released" if closed.released else "unpublished" if unpublished else "lost"
                self._stats.add(labelled("unread_offers", reason=reason))
            if closed.reason and not closed.released and (more := self._log.ask("unread")) is not None:
                logger.warning("kvpool: transfer %s was not read to the end: %s%s", closed.transfer_id, closed.reason, more)
            if sending is not None:
                sending.ended = True
                self._finish(closed.transfer_id, sending)
        self._give_up()

    def _give_up(self) -> None:
        """A rank may never report its copy. What it may still copy belongs to a transfer that nobody can begin any more."""
        now = time.monotonic()
        for transfer_id, sending in [(t, s) for t, s in self._sendings.items() if s.ended and s.copying > 0 and s.until <= now]:
            logger.warning("kvpool: transfer %s: %d ranks have not said that they copied it", transfer_id, sending.copying)
            sending.copying = 0
            self._finish(transfer_id, sending)

    def _finish(self, transfer_id: str, sending: Sending) -> None:
        if sending.copying > 0 or not sending.ended:
            return
        self._unpin(sending)
        del self._sendings[transfer_id]
        if self._staged:
            self._withdraws.append(transfer_id)

    def _unpin(self, sending: Sending) -> None:
        if sending.pinned:
            sending.pinned = False
            self._pins.unpin(sending.job_id)

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def plan_step(self) -> TransferMetadata:
        self.sweep()
        meta = TransferMetadata(len(self._layouts) == self._setup.world_size, withdraws=self._withdraws, publishes=self._publishes)
        self._withdraws, self._publishes = [], []
        return meta

    def busy(self) -> bool:
        """Whether the engine should keep stepping to hear of copies."""
        return any(sending.copying > 0 for sending in self._sendings.values())

    def reset(self) -> bool:
        """What is offered was computed before the reset: nobody may use it any more."""
        self._ledger.drop_all("prefill's cache was reset")
        self.sweep()
        return True

    def take_stats(self) -> TransferStats | None:
        """What has been counted since the last call; gauges once they have changed."""
        gauges: dict[str, float] = {"open_offers": len(self._ledger), "offer_pinned_blocks": self._pins.total}
        if self._stats.is_empty() and gauges == self._told_gauges:
            return None
        taken, self._stats, self._told_gauges = self._stats, TransferStats(), gauges
        for name, value in gauges.items():
            taken.gauge(name, value)
        return taken

    def open_counts(self) -> dict[str, int]:
        """Sizes of all tables: every one is 0 once all transfers have ended."""
        return {"sendings": len(self._sendings), "open": len(self._ledger), "pinned": self._pins.total}

    def shutdown(self) -> None:
        self._responder.close()
