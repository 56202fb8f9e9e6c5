"""A prefill and a decode engine, and the proxy's part between them played by the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.core.signed_fields import sign_fields
from kvpool.ops.services.ports import free_port
from tests.engine.runner import Engine, EngineSpec, Prompt

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
SECRET = "a secret of tests"
StartEngine = Callable[[EngineSpec], Engine]


@dataclass
class PairSpec:
    """``prefill`` and ``decode`` are engine arguments; ``beside`` puts AscendStoreConnector "first" or "last" beside it, with the
    store ``backend``."""

    model: str
    root: Path
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    engine: str = "local_host"
    policy: str = "recompute"
    beside: str | None = None
    backend: str = "local"
    consumer: dict[str, Any] = field(default_factory=dict)  # more options of the decode side's AscendStoreConnector
    pool: dict[str, Any] = field(default_factory=dict)  # and of that of both sides
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def __post_init__(self) -> None:
        self.port = self.port or free_port()

    def spec(self, role: str) -> EngineSpec:
        args = self.prefill if role == "kv_producer" else self.decode
        return EngineSpec(
            model=self.model,
            args={**args, "kv_transfer_config": self._transfer(role)},
            env={"KVPOOL_SECRET": SECRET, **self.env},
        )

    def _transfer(self, role: str) -> dict[str, Any]:
        pull = {
            "kv_connector": "MooncakeConnectorV1",
            "kv_role": role,
            "kv_port": str(self.port),
            "kv_connector_extra_config": {
                "prefill": self._sizes(self.prefill),
                "decode": self._sizes(self.decode),
                "transfer_engine": self.engine,
                "transfer_root": str(self.root),
                "transfer_buffer_size": "256MB",
            },
        }
        if self.beside is None:
            return {**pull, "kv_port": self.port, "kv_load_failure_policy": self.policy}
        local = {
            "local_pool_root": str(self.root),
            "local_pool_name": "pool",
            "local_dram_size": "256MB",
            "lookup_timeout_ms": 20_000,  # a busy machine is no reason for a miss
        }
        pool = {
            "kv_connector": "AscendStoreConnector",
            "kv_role": role,
            "kv_connector_extra_config": {
                "backend": self.backend,
                **(local if self.backend == "local" else {}),
                **self.pool,
                **(self.consumer if role == "kv_consumer" else {}),
            },
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"connectors": [pool, pull] if self.beside == "first" else [pull, pool]},
        }

    @staticmethod
    def _sizes(args: dict[str, Any]) -> dict[str, int]:
        names = {"tp_size": "tensor_parallel_size", "dp_size": "data_parallel_size", "pp_size": "pipeline_parallel_size"}
        return {key: args.get(name, 1) for key, name in names.items()}

    def start(self, start_engine: StartEngine) -> tuple[Engine, Engine]:
        """Both at once: prefill, decode."""
        with ThreadPoolExecutor(2) as pool:
            first, second = (pool.submit(start_engine, self.spec(role)) for role in ("kv_producer", "kv_consumer"))
            return first.result(), second.result()


def offer(prefill: Engine, prompt: Prompt, **more: Any) -> dict[str, Any]:
    """What prefill answers for decode, without vLLM's own entry: with it decode reports prefill's cached tokens as its own."""
    result = prefill.generate([prompt], max_tokens=1, kv_transfer_params=sign_fields(SECRET.encode(), ASK), **more)[0]
    params: dict[str, Any] | None = result["kv_transfer_params"]
    assert params is not None, result
    params.pop("remote_prefill_cached_tokens", None)
    return params


def ask(decode: Engine, prompt: Prompt, params: dict[str, Any] | None, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = decode.generate([prompt], max_tokens=max_tokens, kv_transfer_params=params, timeout_s=60, **more)[0]
    return result


def cold(engine: Engine, prompt: Prompt, salt: str, max_tokens: int = 12) -> list[int]:
    """The tokens that an engine computes from nothing."""
    result = engine.generate([prompt], max_tokens=max_tokens, cache_salt=salt)[0]
    assert not result["num_cached_tokens"]
    tokens: list[int] = result["token_ids"]
    return tokens
