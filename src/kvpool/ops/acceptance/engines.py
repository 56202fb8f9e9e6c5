"""The engines of a run: started one by one, ended, killed and stopped at will, all on one pool."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpool.ops.acceptance.client import Client
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.launch import Launch, LaunchOptions, Place
from kvpool.ops.launch import plan as plans
from kvpool.ops.launch.transfer_config import alone
from kvpool.ops.services.ports import free_port

MODEL = "acceptance"  # its name in requests
POOL = "acceptance"
READY_S, FIRST_S, END_S = 240.0, 300.0, 30.0
LENGTH = 2048  # tokens of the longest request, which is prefilled in one step
ENGINE = (
    f"--max-model-len {LENGTH} --max-num-batched-tokens {LENGTH} --max-num-seqs 8 --enforce-eager --enable-prefix-caching "
    "--enable-prompt-tokens-details"
)
BY_DEVICE = {"cpu": "--dtype float32", "cuda": "--gpu-memory-utilization 0.4", "npu": "--gpu-memory-utilization 0.4"}
"""float32 where it costs nothing; on accelerators two engines share what the environment shows."""
CPU_ONLY = ("VLLM_CPU_OMP_THREADS_BIND",)
WARM_UP = list(range(100, 132))


@dataclass(eq=False, slots=True)
class Engine:
    """``pool``: options of its connector; None: it has none."""

    name: str
    client: Client
    pool: Mapping[str, Any] | None
    policy: str = "recompute"


class Engines:
    """``launch`` has started the pool's service, if there is one. ``left`` cuts deadlines to the time of the whole run."""

    def __init__(
        self, options: AcceptanceOptions, model: str, launch: Launch, place: Place, left: Callable[[float], float]
    ) -> None:
        self._options, self._model, self._launch, self._place, self._left = options, model, launch, place, left
        self._running: set[Engine] = set()
        self.root, self.service = Path(place.shared), options.backend != "local"

    def engine(self, name: str, pool: Mapping[str, Any] | None, policy: str = "recompute") -> Engine:
        """One that can be started."""
        return Engine(name, Client(MODEL, self._left), pool, policy)

    def start(self, engine: Engine) -> str:
        """Where it does not run yet, and ask its first request, which compiles kernels. OSError where it does not come up."""
        if engine in self._running:
            return "runs already"
        process, url = self._process(engine)
        self._launch.add(process, self._left(READY_S))
        self._running.add(engine)
        engine.client.url = url
        usual, engine.client.answer_s = engine.client.answer_s, FIRST_S
        engine.client.ask(WARM_UP, max_tokens=2)
        engine.client.answer_s = usual
        return "answers"

    def end(self, engine: Engine) -> None:
        """In order; nothing where it does not run."""
        if engine in self._running:
            self._running.remove(engine)
            self._launch.end(engine.name, END_S)

    def kill(self, engine: Engine) -> None:
        """SIGKILL to all its processes, as an OOM killer would; nothing is shut down."""
        self._running.remove(engine)
        self._launch.kill(engine.name)

    def stop(self, engine: Engine) -> None:
        self._launch.signal(engine.name, signal.SIGSTOP)

    def go_on(self, engine: Engine) -> None:
        self._launch.signal(engine.name, signal.SIGCONT)

    def stop_service(self) -> None:
        self._launch.signal_service(signal.SIGSTOP)

    def service_goes_on(self) -> None:
        self._launch.signal_service(signal.SIGCONT)

    def kill_service(self) -> None:
        self._launch.signal_service(signal.SIGKILL)

    def start_service_anew(self) -> None:
        """It has a new address: engines that run do not know it."""
        self._launch.start_service()

    def _process(self, engine: Engine) -> tuple[plans.Process, str]:
        """Its process and its URL. vLLM offers to empty its cache in its development mode only."""
        given, port = self._options, free_port()
        words = (*ENGINE.split(), *BY_DEVICE[given.device].split(), *given.engine_args)
        launch = LaunchOptions(
            "mixed", self._model, given.backend, tp=given.tp, kv_cache=given.kv_cache, served_name=MODEL, engine_args=words
        )
        config = (
            None if engine.pool is None else {**alone({**self._store(), **engine.pool}), "kv_load_failure_policy": engine.policy}
        )
        process = plans.engine(engine.name, launch, self._place, config, (plans.HERE, port, "--port"), 0)
        env = {name: value for name, value in process.env.items() if given.device == "cpu" or name not in CPU_ONLY}
        if given.device == "npu":
            env["KVPOOL_TAKEOVER"] = "1"  # vllm_ascend registers the same name
        return replace(process, env={**env, "VLLM_SERVER_DEV_MODE": "1"}), process.ready.removesuffix("/health")

    def _store(self) -> dict[str, Any]:
        """Saves may pin a large share of an engine's cache, which is hardly larger than the prompts."""
        if self.service:
            return {"backend": self._options.backend, "max_pinned_save_percent": 50}
        return {
            "backend": "local",
            "local_pool_root": str(self.root),
            "local_pool_name": POOL,
            "local_dram_size": self._options.dram,
            "max_pinned_save_percent": 50,
        }
