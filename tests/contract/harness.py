"""A model-free engine: vLLM's own scheduler and KV-cache manager, our connector in both roles, and a model runner that writes
bytes which follow from the prefix. Before each forward every byte that the step reads is compared with what it must be.

A step whose computed blocks are wrong computes wrong KV and samples ``POISON_TOKEN``, as a model would. That is only right where the
connector reports the blocks as failed in this very step; everything else is an ``OracleError``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool.stores.base import Store
from tests.contract.content import POISON_TOKEN, Int64, Prefixes, expected_output, sample
from tests.contract.fakestore import FakeStore
from tests.contract.ranks import Rank, unwrap
from tests.contract.spec import Spec, kv_cache_config, vllm_config

POISON_WEIGHTS = 1 << 40


class OracleError(AssertionError):
    """Wrong KV was used, stored or answered from."""


@dataclass
class Plan:
    """What one step does for one request."""

    request: Request
    start: int
    scheduled: int
    drafts: list[int]
    tables: tuple[list[int], ...]
    states: Int64
    resumed: bool

    @property
    def name(self) -> str:
        return self.request.request_id


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None  # of its end: stop, length, abort, error


class Harness:
    """One engine. ``store`` is shared by all its parts, and by other engines if they are given the same."""

    def __init__(self, spec: Spec = Spec(), store: Store | None = None, check_store: bool = True) -> None:
        self.spec = spec
        self.store: Any = store if store is not None else FakeStore()
        config = vllm_config(spec)
        init_none_hash(hash_fn := get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        unit = spec.hash_block_size or spec.block_size
        self._hasher = get_request_block_hasher(unit, hash_fn)
        self.prefixes = Prefixes(unit, check_store)
        with mock.patch("kvpool.engine.setup.build_store", lambda *_, **__: self.store):
            self.scheduler = Scheduler(
                config, kv_cache_config(spec), StructuredOutputManager(config), spec.block_size, unit, log_stats=True
            )
            self.ranks = [Rank(spec, config, index) for index in range(spec.ranks)]
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, spec.ranks)
        if spec.drafts:
            self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = spec.drafts
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Request] = {}
        self.weights = 0
        self.weights_of: dict[str, int] = {}  # namespace -> weights
        self.mixed: set[str] = set()  # requests whose KV is of several weights versions
        self.local_stale = False
        self.accept: Callable[[str], int] = lambda name: 0  # how many draft tokens are right
        self.shares_store = False  # with another engine, whose requests are not known here
        self.steps = 0
        self.external: dict[str, int] = {}  # tokens that each request was given by the connector
        self.last: KVConnectorOutput | None = None
        self.during: list[Callable[[], None]] = []  # run between the forward and the update, once
        handshakes = {(r.stage, r.tp_rank): r.connector.get_handshake_metadata() for r in self.ranks}
        if all(h is not None for h in handshakes.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(handshakes)))
        self._note_namespace()

    # ---- requests -----------------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        salt: str | None = None,
        lora: str | None = None,
        images: list | None = None,
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        adapter = LoRARequest(lora, sum(lora.encode()), "/nowhere") if lora is not None else None
        request = Request(
            name, list(prompt), params, None, block_hasher=self._hasher, cache_salt=salt, lora_request=adapter, mm_features=images
        )
        self.requests[name], self.answers[name] = request, Answer()
        self.prefixes.of(request)
        self.scheduler.add_request(request)
        self._note_namespace()
        return request

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            if name in self.answers and self.answers[name].reason is None:
                self.answers[name].reason = "abort"

    def preempt(self, name: str) -> None:
        """As the scheduler does it when blocks run out."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=self.scheduler.requires_kv_delivery)

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """As EngineCore.step; False when there was nothing to do."""
        if not self.scheduler.has_requests():
            return False
        self.steps += 1
        output = self.scheduler.schedule()
        plans = self._plans(output)
        for plan in plans:
            if plan.request.prefill_stats is not None:
                self.external[plan.name] = plan.request.prefill_stats.num_external_cached_tokens
        results: list[KVConnectorOutput] = []
        with ExitStack() as hooks:
            for rank in self.ranks:
                results.append(hooks.enter_context(rank.step(output)))
            wrong = self._forward(plans)
        sampled, drafts = self._sample(plans, wrong)
        model_output = self._aggregate(plans, results, sampled)
        self.last = model_output.kv_connector_output
        self._note_namespace()
        during, self.during = self.during, []
        for call in during:
            call()
        before = {plan.name: len(self.answers[plan.name].tokens) for plan in plans}
        self._take(self.scheduler.update_from_output(output, model_output))
        self._judge(plans, wrong, before)
        if self.spec.drafts:
            live = [(n, d) for n, d in drafts.items() if n in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds([n for n, _ in live], [d for _, d in live]))
        return True

    def _plans(self, output: SchedulerOutput) -> list[Plan]:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        plans = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request, drafts = self.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            first = name in cached.resumed_req_ids or all(name != n for n in cached.req_ids)
            plans.append(Plan(request, starts[name], scheduled, drafts, tables, self.prefixes.of(request, drafts), first))
        return plans

    def _forward(self, plans: list[Plan]) -> dict[str, set[int]]:
        """Write the step's KV. Requests that read wrong KV, with the blocks; what they write is poison."""
        wrong: dict[str, set[int]] = {}
        for plan in plans:
            if plan.resumed:
                self.mixed.discard(plan.name)
            self._write(plan, self.weights if plan.name not in self.mixed else POISON_WEIGHTS + self.steps)
        fresh = True
        while fresh:
            fresh = {p.name: bad for p in plans if p.name not in wrong and p.name not in self.mixed and (bad := self._wrong(p))}
            for plan in plans:
                if plan.name in fresh:
                    self._write(plan, POISON_WEIGHTS + self.steps)
                    if plan.resumed and self.local_stale:
                        self.mixed.add(plan.name)  # it builds on blocks of before a reset that could not drop them
            wrong |= {name: bad for name, bad in fresh.items() if name not in self.mixed}
        return wrong

    def _write(self, plan: Plan, weights: int) -> None:
        states = plan.states[plan.start : plan.start + plan.scheduled]
        for rank in self.ranks:
            for group, table in enumerate(plan.tables):
                rank.write(group, table, plan.start, states, weights)

    def _wrong(self, plan: Plan) -> set[int]:
        """Block ids that the step reads and that are not exactly right."""
        bad: set[int] = set()
        for group, (kind, window) in enumerate(self.spec.groups):
            first = 0
            if kind == "sliding":
                first = max(0, plan.start - window + 1)
            elif kind == "chunked":
                first = plan.start // window * window
            if first >= plan.start:
                continue
            table, states = plan.tables[group], plan.states[first : plan.start]
            for rank in self.ranks:
                bad |= {table[i] for i in rank.wrong_blocks(group, table, first, states, self.weights)}
        return bad

    def _sample(self, plans: list[Plan], wrong: dict[str, set[int]]) -> tuple[list[list[int]], dict[str, list[int]]]:
        sampled, drafts = [], {}
        for plan in plans:
            known = plan.start + plan.scheduled - len(plan.drafts)
            if known < plan.request.num_tokens:
                sampled.append([])
                continue
            tokens = [sample(int(plan.states[known - 1]))]
            for i, draft in enumerate(plan.drafts):
                if draft != tokens[-1]:
                    break
                tokens.append(sample(int(plan.states[known + i])))
            sampled.append([POISON_TOKEN] if plan.name in wrong else tokens)
            drafts[plan.name] = self._draft(plan, tokens)
        return sampled, drafts

    def _draft(self, plan: Plan, tokens: list[int]) -> list[int]:
        """``drafts`` guesses, of which the first ``accept`` are right."""
        prompt = [*plan.request.all_token_ids, *tokens]
        right = expected_output(prompt, self.spec.drafts)
        return [t if i < self.accept(plan.name) else POISON_TOKEN + 1 for i, t in enumerate(right)]

    def _aggregate(self, plans: list[Plan], results: list[KVConnectorOutput], sampled: list[list[int]]) -> ModelRunnerOutput:
        names = [plan.name for plan in plans]
        outputs = [
            ModelRunnerOutput(
                names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=pickle.loads(pickle.dumps(r))
            )
            for r in results
        ]
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        return combined

    def _take(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            for one in batch.outputs:
                answer = self.answers[one.request_id]
                answer.tokens += one.new_token_ids
                if one.finish_reason is not None:
                    answer.reason = str(one.finish_reason)

    def _check_answer(self, name: str) -> None:
        request, answer = self.requests[name], self.answers[name]
        if request.mm_features or name in self.mixed:
            return
        lora = request.lora_request.lora_name if request.lora_request is not None else None
        right = expected_output(request.prompt_token_ids, len(answer.tokens), lora, request.cache_salt)
        if answer.tokens != right:
            raise OracleError(f"{name}: answered {answer.tokens}, right is {right}")

    def _judge(self, plans: list[Plan], wrong: dict[str, set[int]], before: dict[str, int]) -> None:
        """Wrong KV is excused only where this step reported it and nothing came of it."""
        reported = self.last.invalid_block_ids if self.last is not None else set()
        for plan in plans:
            bad = wrong.get(plan.name)
            if not bad:
                continue
            where = (
                f"step {self.steps}: {plan.name} read wrong KV in blocks {sorted(bad)} of {plan.tables} up to token {plan.start}"
            )
            if not bad & reported:
                raise OracleError(f"{where}; reported were {sorted(reported)}")
            if len(self.answers[plan.name].tokens) != before[plan.name]:
                raise OracleError(f"{where} and answered from it")
        for plan in plans:
            self._check_answer(plan.name)
            if plan.request.is_finished():
                self.prefixes.forget(plan.name)

    # ---- longer runs --------------------------------------------------------------------------------------------------------

    def run(self, names: Iterable[str] | None = None, seconds: float = 20.0) -> None:
        """Step until the given requests (default: all) have ended."""
        end = time.monotonic() + seconds
        names = list(self.answers if names is None else names)
        while any(self.answers[name].reason is None for name in names):
            assert time.monotonic() < end, f"still running: {[n for n in names if self.answers[n].reason is None]}"
            if not self._progress():
                time.sleep(0.0005)

    def until(self, true: Callable[[], Any], seconds: float = 10.0, step: bool = False) -> None:
        """Wait for the worker threads, stepping meanwhile where asked to."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "waited in vain"
            if step:
                self.step()
            time.sleep(0.0005)

    def _progress(self) -> bool:
        before = sum(len(a.tokens) for a in self.answers.values()) if len(self.answers) < 64 else -1
        self.step()
        return before < 0 or sum(len(a.tokens) for a in self.answers.values()) > before

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> list[int]:
        """One request from start to end."""
        self.add(name, prompt, max_tokens, **more)
        self.run([name])
        return self.answers[name].tokens

    def settle(self, seconds: float = 10.0) -> None:
        """Step until no job is open and no worker thread is busy."""
        end = time.monotonic() + seconds
        while any(self.counts().values()):
            assert time.monotonic() < end, f"not idle: { {k: v for k, v in self.counts().items() if v} }"
            self.scheduler.finished_req_ids.add("nobody")  # makes the engine step
            self.step()
            time.sleep(0.0005)

    def settle_jobs(self) -> None:
        """Wait until the workers have ended what they were given; the engine does not step."""
        sides = [rank.worker_side for rank in self.ranks]
        given = lambda: sum(job.job_id not in side._reports for side in sides for job in self._open_jobs())  # noqa: E731
        self.until(lambda: given() == 0)

    def _open_jobs(self) -> list[Any]:
        held = {job.job_id for job, _ in self.pool._held._waiting}
        return [opened.job for opened in self.pool._jobs.values() if opened.job.job_id not in held]

    def forget_local(self) -> None:
        """Empty the engine's own prefix cache, so that the pool is asked."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()

    def new_weights(self, reset_running: bool = False) -> bool:
        """Weights change in place, and the caches are reset as the operator is told to."""
        self.weights += 1
        done = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running, reset_connector=True)
        self.mixed |= {n for n, r in self.scheduler.requests.items() if r.num_computed_tokens > 0}
        self.local_stale = bool(self.scheduler.kv_cache_manager.block_pool.cached_block_hashes_by_block)
        self._note_namespace()
        return done

    def _note_namespace(self) -> None:
        namespace = self.pool._agreement.namespace
        if namespace:
            self.weights_of.setdefault(namespace, self.weights)

    # ---- what must be true --------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> Any:
        """Our scheduler side."""
        return unwrap(self.scheduler.connector).scheduler_side

    @property
    def blocks(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def counts(self) -> dict[str, int]:
        """Sizes of all tables that must be empty when nothing runs."""
        found = {f"scheduler.{k}": v for k, v in self.pool.open_counts().items()}
        for i, rank in enumerate(self.ranks):
            side = rank.worker_side
            for name in ("_reports", "_finished_loads", "_failed_loads", "_bad_blocks", "_lingering"):
                found[f"rank{i}.{name}"] = len(getattr(side, name))
            found[f"rank{i}.backlog"] = side._loaders.backlog() + side._savers.backlog()
        for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "requests"):
            found[name] = len(getattr(self.scheduler, name))
        found["aggregator"] = len(self._aggregator._recv_remaining_count) + len(self._aggregator._failed_recving_pending)
        found["leases"] = len(getattr(self.store, "leased", ()))
        found["blocks"] = self.spec.num_blocks - 1 - self.blocks.get_num_free_blocks()
        return found

    def assert_clean(self, seconds: float = 10.0) -> None:
        """Nothing is left of anything, and all that the store holds is right."""
        self.settle(seconds)
        assert not getattr(self.store, "lease_faults", []), self.store.lease_faults
        assert {b.ref_cnt for b in self.blocks.blocks if not b.is_null} <= {0}
        if self.prefixes.remember:
            self.check_store()

    def check_store(self) -> None:
        """Every object of the pool holds exactly the KV that its key promises."""
        shards = {name: place for rank in self.ranks for name, place in rank.shards().items()}
        for key, data in list(getattr(self.store, "objects", {}).items()):
            _, namespace, group, shard, text = key.decode().split(":")
            states = self.prefixes.of_block(bytes.fromhex(text), self.spec.block_size)
            if states is None:
                assert self.shares_store, f"a key of no known request: {key.decode()}"
                continue
            right = object_bytes(states, *shards[(int(group), shard)], self.weights_of[namespace])
            if data != right:
                raise OracleError(f"the pool holds wrong KV under {key.decode()}")

    def close(self) -> None:
        for gate in getattr(self.store, "gates", {}).values():
            gate.set()
        if isinstance(self.store, FakeStore):
            self.store.hold.clear()
            self.store.finish_held()
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.connector.shutdown()


def object_bytes(states: Int64, layers: list[int], heads: range, weights: int) -> bytes:
    """An object, layer-major: each page is [head, token, word]."""
    from tests.contract.content import values

    return np.ascontiguousarray(values(states, layers, heads, weights).transpose(1, 2, 0, 3)).tobytes()
