"""A prefill and a decode engine of the harness, in one process, joined by MooncakeConnectorV1 over a real channel on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from kvpool.core.signed_fields import sign_fields
from kvpool.ops.services.ports import free_port
from tests.contract.harness import Harness
from tests.contract.spec import Spec

ASK = {"do_remote_decode": True, "do_remote_prefill": False}


def pull_child(connector: Any) -> Any:
    """Our transfer connector, also from inside a MultiConnector."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(c for c in children if hasattr(type(c), "transfer_worker"))


class Half(Harness):
    """One of the two. ``params[name]`` is what the answer of a request carried."""

    def __init__(self, spec: Spec, store: Any = None) -> None:
        self.params: dict[str, dict[str, Any]] = {}
        super().__init__(spec, store)

    def request(self, name: str, prompt: Any, max_tokens: int = 1, **more: Any) -> Request:
        params, signed = more.pop("params", None), more.pop("signed", True)
        if signed and params is not None and params.get("do_remote_decode"):
            params = sign_fields(os.environ["KVPOOL_SECRET"].encode(), params)
        request = super().request(name, prompt, max_tokens, **more)
        # As through HTTP and a proxy.
        request.kv_transfer_params = json.loads(json.dumps(params)) if params is not None else None
        return request

    def _take(self, outputs: dict[int, Any]) -> None:
        super()._take(outputs)
        for batch in outputs.values():
            for one in batch.outputs:
                if one.kv_transfer_params is not None:
                    self.params[one.request_id] = one.kv_transfer_params

    @property
    def side(self) -> Any:
        return pull_child(self.scheduler.connector).side

    @property
    def workers(self) -> list[Any]:
        return [pull_child(rank.connector).transfer_worker for rank in self.ranks]

    def counts(self) -> dict[str, int]:
        found = super().counts() if self.spec.beside is not None else self._engine_counts()
        found |= {f"side.{name}": count for name, count in self.side.open_counts().items()}
        for i, worker in enumerate(self.workers):
            found |= {f"worker{i}.{name}": count for name, count in worker.open_counts().items()}
        return found

    def _engine_counts(self) -> dict[str, int]:
        found = {
            name: len(getattr(self.scheduler, name))
            for name in ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "requests")
        }
        found["aggregator"] = len(self._aggregator._recv_remaining_count) + len(self._aggregator._failed_recving_pending)
        found["blocks"] = self.spec.num_blocks - 1 - self.blocks.get_num_free_blocks()
        return found

    def drain(self) -> None:
        """Step for as long as the engine itself would."""
        self.until(lambda: not self.step())


class Pair:
    """``prefill`` and ``decode``; ``hand_over`` is what a proxy does."""

    def __init__(self, prefill: Half, decode: Half) -> None:
        self.prefill, self.decode = prefill, decode

    def offer(self, name: str, prompt: Any, **more: Any) -> dict[str, Any]:
        """Prefill computes the prompt; the params of its answer."""
        self.prefill.ask(name, prompt, 1, params=more.pop("asked", ASK), **more)
        self.prefill.drain()
        return self.prefill.params[name]

    def hand_over(self, name: str, prompt: Any, max_tokens: int = 3, **more: Any) -> list[int]:
        return self.decode.ask(name, prompt, max_tokens, params=self.offer(name, prompt, **more), **more)

    def assert_clean(self) -> None:
        """Nothing is left of anything on either side."""
        for half in (self.decode, self.prefill):
            half.settle()
            assert {b.ref_cnt for b in half.blocks.blocks if not b.is_null} <= {0}


def make_pair(
    root: Path,
    start: Callable[[Spec, Any], Half],
    engine: str,
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    **common: Any,
) -> Pair:
    """``prefill`` and ``decode`` are fields of ``Spec`` for one side, ``common`` for both."""
    pull = {
        "prefill": {"tp_size": prefill.get("tp", 1), "dp_size": 1, "pp_size": prefill.get("pp", 1)},
        "decode": {"tp_size": decode.get("tp", 1), "dp_size": 1},
        "transfer_engine": engine,
        "transfer_root": str(root),
        "transfer_buffer_size": "8MB",
        "cache_namespace": "contract",
    }
    port, store = common.pop("port", None) or free_port(), common.pop("store", None)
    halves = []
    for role, fields in (("kv_producer", prefill), ("kv_consumer", decode)):
        own = dict(fields)
        merged = {**common, **own, "pull": {**pull, **own.get("pull", {})}, "role": role, "port": port}
        halves.append(start(Spec(**merged), store))
    return Pair(*halves)
