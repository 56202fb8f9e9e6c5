"""A model-free engine: vLLM's own scheduler and KV-cache manager, our connector in both roles, and a model runner that writes
bytes which follow from the prefix. Before each forward every byte that the step reads is compared with what it must be.

A step whose computed blocks are wrong computes wrong KV and samples ``POISON_TOKEN``, as a model would. That is only right where
the connector reports the blocks as failed in this very step; everything else is an ``OracleError``.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool.stores.base import Store
from tests.contract.content import Prefixes, expected_output
from tests.contract.fakestore import FakeStore
from tests.contract.model import Model, OracleError, Plan, object_bytes
from tests.contract.ranks import Rank, unwrap
from tests.contract.realpool import RealPool
from tests.contract.spec import Spec, adapter_folder, kv_cache_config, vllm_config


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None  # of its end: stop, length, abort, error


class Harness(Model):
    """One engine. ``store`` is shared by all its parts, and by other engines if they are given the same."""

    def __init__(self, spec: Spec | None = None, store: Store | None = None, check_store: bool = True) -> None:
        spec = spec or Spec()
        self.spec = spec
        self.store: Any = store if store is not None else FakeStore()
        config = vllm_config(spec)
        init_none_hash(hash_fn := get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        unit = spec.hash_block_size or spec.block_size
        self._hasher = get_request_block_hasher(unit, hash_fn)
        self.prefixes = Prefixes(unit, check_store)
        real = isinstance(self.store, RealPool)  # whose parts open it by themselves
        with nullcontext() if real else mock.patch("kvpool.engine.opening.build_store", return_value=self.store):
            self.scheduler = Scheduler(
                config, kv_cache_config(spec), StructuredOutputManager(config), spec.block_size, unit, log_stats=True
            )
            self.ranks = [Rank(spec, config, index) for index in range(spec.ranks)]
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, spec.ranks)
        self.scheduler.max_num_encoder_input_tokens = 4096  # for requests with images
        self.scheduler.encoder_cache_manager = EncoderCacheManager(4096)
        if spec.drafts:
            self.scheduler.num_spec_tokens = self.scheduler.num_lookahead_tokens = spec.drafts
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Request] = {}
        self.weights = 0
        self.weights_of: dict[str, int] = {}  # namespace -> weights
        self.mixed: set[str] = set()  # requests whose KV is of several weights versions
        self.loading_old: set[str] = set()  # requests whose load was under way when the weights changed
        self.local_stale = False
        self.accept: Callable[[str], int] = lambda name: 0  # how many draft tokens are right
        self.shares_store = False  # with another engine, whose requests are not known here
        self.steps = 0
        self.external: dict[str, int] = {}  # tokens that each request was given by the connector
        self.metrics: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()  # vLLM's own count of external hits by tier, in tokens
        self.events: list[Any] = []  # all KV events, vLLM's and ours, as a subscriber sees them
        publish = lambda batch: self.events.extend(batch.events)  # noqa: E731
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=publish, shutdown=lambda: None)
        self.last: KVConnectorOutput | None = None
        self.during: list[Callable[[], None]] = []  # run between the forward and the update, once
        handshakes = {(r.stage, r.tp_rank): r.connector.get_handshake_metadata() for r in self.ranks}
        if all(h is not None for h in handshakes.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(handshakes)))

    # ---- requests -----------------------------------------------------------------------------------------------------------

    def request(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Request:
        """Not yet added. ``salt``, ``lora`` (a name) and ``images`` tell apart what has the same tokens."""
        lora = more.get("lora")
        request = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=self._hasher,
            cache_salt=more.get("salt"),
            lora_request=LoRARequest(lora, sum(lora.encode()), adapter_folder(lora)) if lora is not None else None,
            mm_features=more.get("images"),
        )
        self.requests[name], self.answers[name] = request, Answer()
        self.prefixes.of(request)
        return request

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Request:
        request = self.request(name, prompt, max_tokens, **more)
        self.scheduler.add_request(request)
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
        self._note_namespaces(output.kv_connector_metadata)
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

    def tables_of(self, name: str) -> tuple[list[int], ...]:
        return self.scheduler.kv_cache_manager.get_block_ids(name)

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

    def count_metrics(self) -> Counter[str]:
        """The connector's counters from now on, as they reach vLLM."""
        self.metrics = Counter()
        return self.metrics

    def _take(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            stats = batch.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                ours = stats.kv_connector_stats.get("AscendStoreConnector", stats.kv_connector_stats)
                self.metrics.update({k: v for k, v in getattr(ours, "data", ours).items() if isinstance(v, int | float)})
            if stats is not None and stats.connector_prefix_cache_stats is not None:
                found = stats.connector_prefix_cache_stats.hits_by_source
                self.sources.update({source.value: tokens for source, tokens in found.items()})
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

    def run(self, names: Iterable[str] | None = None, seconds: float = 60.0) -> None:
        """Step until the given requests (default: all) have ended."""
        end = time.monotonic() + seconds
        names = list(self.answers if names is None else names)
        while any(self.answers[name].reason is None for name in names):
            assert time.monotonic() < end, f"still running: {[n for n in names if self.answers[n].reason is None]}"
            if not self._progress():
                time.sleep(0.0005)

    def until(self, true: Callable[[], Any], seconds: float = 60.0, step: bool = False) -> None:
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

    def settle(self, seconds: float = 60.0) -> None:
        """Step until no job is open and no worker thread is busy."""
        end = time.monotonic() + seconds
        while any(self.counts().values()):
            assert time.monotonic() < end, f"not idle: { {k: v for k, v in self.counts().items() if v} }"
            if isinstance(self.store, FakeStore) and not self.store.hold:
                self.store.finish_held()  # what a thread was about to hold when holding ended
            self.scheduler.finished_req_ids.add("nobody")  # makes the engine step, as the next request would
            self.step()
            time.sleep(0.0005)

    def settle_jobs(self) -> None:
        """Wait until the workers have ended what they were given; the engine does not step."""
        sides = [rank.worker_side for rank in self.ranks]

        def ended(opened: Any) -> bool:
            """By every rank: some may have said so in a step before."""
            said = [side._reports[opened.job.job_id].ranks for side in sides if opened.job.job_id in side._reports]
            return opened.report.ranks + sum(said) >= len(sides)

        self.until(lambda: all(ended(opened) for opened in self._open_jobs()))

    def settle_reports(self) -> None:
        """Step until no job is open, whatever runs meanwhile."""
        self.until(lambda: len(self.pool._jobs) == 0, step=True)

    def _open_jobs(self) -> list[Any]:
        held = {job.job_id for job, _ in self.pool._held._waiting}
        return [opened for opened in self.pool._jobs._jobs.values() if opened.job.job_id not in held]

    def forget_local(self) -> None:
        """Empty the engine's own prefix cache, so that the pool is asked."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()

    def new_weights(self, reset_running: bool = False) -> bool:
        """Weights change in place, and the caches are reset as the operator is told to."""
        self.weights += 1
        done = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running, reset_connector=True)
        live = self.scheduler.requests.items()
        self.mixed |= {n for n, r in live if r.num_computed_tokens > 0}
        self.loading_old = {n for n, r in live if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
        self.local_stale = len(self.blocks.cached_block_hash_to_block) > 0 or bool(self.mixed)
        return done

    def _note_namespaces(self, metadata: Any) -> None:
        """Jobs that are planned now are for KV of the weights of now."""
        for one in getattr(metadata, "metadata", (metadata,)):
            for job in getattr(one, "saves", ()):
                self.weights_of.setdefault(job.namespace, self.weights)

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
            for name in ("_reports", "_finished_loads", "_failed_loads", "_bad_blocks", "_lingering", "_runs", "_echoes"):
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
            right = object_bytes(states, *shards[(int(group), shard)], self.weights_of.get(namespace, 0))
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
