"""One simulated worker: real tensors, our connector in its worker role, and vLLM's own order of connector hooks."""

from __future__ import annotations

import pickle
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvpool.core.keys import Shard
from kvpool.core.shards import head_span
from tests.contract.content import Int64, values
from tests.contract.spec import HEAD_SIZE, WORDS, Spec, kv_cache_config, layer_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


def unwrap(connector: Any) -> Any:
    """Our connector, also from inside a MultiConnector."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(c for c in children if hasattr(type(c), "worker_side"))


class Rank:
    """``memory[i]`` is [slot, block, head, token, word]: slot s is the s-th layer of each group, which alias as in vLLM."""

    def __init__(self, spec: Spec, config: VllmConfig, index: int) -> None:
        self.spec = spec
        self.stage, self.tp_rank = divmod(index, spec.tp)
        span = head_span(spec.heads, spec.tp, self.tp_rank)
        self.heads = range(span.first, span.last + 1)
        self.layers = [spec.layers_of(group, self.stage) for group in range(len(spec.groups))]
        slots = max(map(len, self.layers))
        shape = (slots, spec.num_blocks, len(self.heads), spec.block_size, WORDS)
        self.buffer = torch.zeros(int(np.prod(shape)) * 8, dtype=torch.int8)
        self.memory: Int64 = self.buffer.numpy().view(np.int64).reshape(shape)
        with self._as_this_rank():
            kv_config = kv_cache_config(spec, self.stage)
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
            self.connector.register_kv_caches(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        floats = self.buffer.view(torch.float32)
        shape = (self.spec.num_blocks, len(self.heads), self.spec.block_size, 2 * HEAD_SIZE)
        size = int(np.prod(shape))
        for layers in self.layers:
            for slot, layer in enumerate(layers):
                tensors[layer_name(layer)] = floats[slot * size : (slot + 1) * size].view(shape)
        return tensors

    @contextmanager
    def _as_this_rank(self) -> Iterator[None]:
        tp = SimpleNamespace(world_size=self.spec.tp, rank_in_group=self.tp_rank)
        pp = SimpleNamespace(world_size=self.spec.pp, rank_in_group=self.stage)
        world = SimpleNamespace(local_rank=self.tp_rank)
        groups = {"get_tp_group": tp, "get_pp_group": pp, "get_world_group": world}
        with ExitStack() as stack:
            for name, group in groups.items():
                stack.enter_context(mock.patch(f"kvpool.engine.cache_layout.{name}", return_value=group))
            yield

    @property
    def worker_side(self) -> Any:
        return unwrap(self.connector).worker_side

    @contextmanager
    def step(self, output: SchedulerOutput) -> Iterator[KVConnectorOutput]:
        """Around the forward: vLLM's own code, so its own order of hooks. Metadata travels pickled, as between processes."""
        shipped = SimpleNamespace(
            kv_connector_metadata=pickle.loads(pickle.dumps(output.kv_connector_metadata)),
            has_sync_kv_loads=output.has_sync_kv_loads,
            finished_req_ids=set(output.finished_req_ids),
        )
        self.connector.handle_preemptions(shipped.kv_connector_metadata)
        with mock.patch.multiple(mixin, get_kv_transfer_group=lambda: self.connector, get_forward_context=lambda: None):
            inner = mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(shipped)
            result = inner.__enter__()
        yield result
        with mock.patch.object(mixin, "get_forward_context", return_value=None):
            inner.__exit__(None, None, None)

    # ---- memory -------------------------------------------------------------------------------------------------------------

    def _where(self, table: list[int], first: int, last: int) -> tuple[Int64, Int64]:
        positions = np.arange(first, last)
        return np.asarray(table, dtype=np.int64)[positions // self.spec.block_size], positions % self.spec.block_size

    def write(self, group: int, table: list[int], first: int, states: Int64, weights: int) -> None:
        """The KV of tokens ``first`` and on, as the forward writes it."""
        blocks, offsets = self._where(table, first, first + len(states))
        slots = np.arange(len(self.layers[group]))
        self.memory[slots[None, :], blocks[:, None], :, offsets[:, None]] = values(states, self.layers[group], self.heads, weights)

    def wrong_blocks(self, group: int, table: list[int], first: int, states: Int64, weights: int) -> list[int]:
        """Indexes of blocks that do not hold exactly the KV of tokens ``first`` and on."""
        blocks, offsets = self._where(table, first, first + len(states))
        slots = np.arange(len(self.layers[group]))
        held = self.memory[slots[None, :], blocks[:, None], :, offsets[:, None]]
        wrong = (held != values(states, self.layers[group], self.heads, weights)).any(axis=(1, 2, 3)) | (blocks == 0)
        return sorted({int(p) // self.spec.block_size for p in np.flatnonzero(wrong) + first})

    def _shard_name(self, span: list[int], drafts: bool) -> str:
        """As the worker has named it where the rank is in the name: a drafter's heads are its own affair."""
        name = str(Shard(self.heads.start, self.heads.stop - 1, tuple(span)))
        told = [shard for _, shard, _ in self.worker_side.info.shards]
        return next(shard for shard in told if shard.endswith(name[name.index("_l") :])) if drafts else name

    def shards(self) -> dict[tuple[int, str], tuple[list[int], range]]:
        """(group, shard) -> layers and heads of an object."""
        found = {}
        for group, layers in enumerate(self.layers):
            target = self.spec.num_layers - self.spec.draft_layers
            for span in ([i for i in layers if i < target], [i for i in layers if i >= target]):
                if span:
                    found[(group, self._shard_name(span, drafts=span[0] >= target))] = (span, self.heads)
        return found
