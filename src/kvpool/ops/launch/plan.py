"""From mode and options to what is started: which processes, with which commands, variables and ports. Pure: nothing is looked at
and nothing is started here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.ops.launch import transfer_config
from kvpool.ops.launch.options import LaunchOptions

SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` fails where the distribution is not called vllm
PROXY_CODE = "import sys; from kvpool.proxy.command import main; sys.exit(main(prog='kvpool proxy'))"
HERE = "127.0.0.1"
TRANSFER_BUFFER = 1 << 30
WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launch happens. ``folder`` holds logs and temporary files; ``shared``, in shared memory, local pools, and
    sockets, whose paths must be short.

    ``ports`` by flag; ``cpus`` are the numbers of those that may be used, ``devices`` numbers or names."""

    folder: str
    shared: str
    ports: Mapping[str, int]
    secret: str
    python: str
    cpus: Sequence[int] = (0,)
    devices: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PoolService:
    """The service of a store: ``owner_dram`` bytes come from a process of its own, ``engine_dram`` from each engine rank."""

    backend: str
    owner_dram: int
    engine_dram: int


@dataclass(frozen=True, slots=True)
class Process:
    """``env`` is added to the environment, ``ports`` is what it listens on, by flag; ready once GET of ``ready`` answers 200."""

    name: str
    command: tuple[str, ...]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The service first, then all processes at once. ``url`` is where requests go, ``model`` their model."""

    processes: tuple[Process, ...]
    url: str
    model: str
    service: PoolService | None = None


def make_plan(options: LaunchOptions, place: Place) -> Plan:
    """``options`` have been checked; ``place.ports`` has every port that the mode needs."""
    port, pool = place.ports["--port"], _pool_options(options, place)
    url = f"http://{_in_url(options.host)}:{port}"
    service = _service(options)
    if options.mode != "pd":
        config = transfer_config.alone(pool)
        one = engine("engine", options, place, config, (options.host, port, "--port"), 0)
        return Plan((one,), url, options.name, service)
    kv_port = place.ports["--kv-port"]
    pull = {"transfer_root": place.shared, "transfer_buffer_size": TRANSFER_BUFFER}
    sides = []
    for number, (name, role) in enumerate((("prefill", "kv_producer"), ("decode", "kv_consumer"))):
        config = transfer_config.paired(role, kv_port, options.tp, pool, pull)  # type: ignore[arg-type]
        flag = f"--{name}-port"
        sides.append(engine(name, options, place, config, (HERE, place.ports[flag], flag), number))
    return Plan((*sides, _proxy(options, place, url)), url, options.name, service)


def plain_plan(options: LaunchOptions, place: Place) -> Plan:
    """What to compare with: one engine with the same arguments, the CPUs of the first one of ``make_plan``, and no connector."""
    port = place.ports["--port"]
    one = engine("engine", options, place, None, (options.host, port, "--port"), 0)
    return Plan((one,), f"http://{_in_url(options.host)}:{port}", options.name)


def engine(
    name: str,
    options: LaunchOptions,
    place: Place,
    config: Mapping[str, Any] | None,
    listens: tuple[str, int, str],
    number: int,
) -> Process:
    """An OpenAI server: ``listens`` has its host, its port and the flag that says it; ``number`` is which share of this host's CPUs
    or devices it takes. Without ``config`` it has no connector."""
    host, port, flag = listens
    command = [place.python, "-m", SERVER, "--model", options.model, "--host", host, "--port", str(port)]
    if options.served_name is not None:
        command += ["--served-model-name", options.served_name]
    command += ["--tensor-parallel-size", str(options.tp)]
    if options.kv_cache is not None:
        command += ["--kv-cache-memory-bytes", str(options.kv_cache)]
    if config is not None:
        command += ["--kv-transfer-config", json.dumps(config)]
    env = {"VLLM_HOST_IP": HERE, "GLOO_SOCKET_IFNAME": "lo", "VLLM_RPC_BASE_PATH": place.shared, "TMPDIR": place.folder}
    if options.mode == "pd":
        env["KVPOOL_SECRET"] = place.secret
    env |= _share(options, place, number)
    ports = {flag: port}
    if name == "prefill":
        ports["--kv-port"] = place.ports["--kv-port"]
    ready = f"http://{_in_url(host)}:{port}/health"
    return Process(name, (*command, *options.engine_args), ready, env, ports)


def _share(options: LaunchOptions, place: Place, number: int) -> dict[str, str]:
    """The CPUs of each rank, ranks divided by "|", or the devices of this engine. Where CPUs are too few, ranks share them."""
    if options.device == "cuda":
        mine = place.devices[number * options.tp : (number + 1) * options.tp]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
    ranks = len(options.engines) * options.tp
    width = max(1, len(place.cpus) // ranks)
    shares = []
    for rank in range(number * options.tp, (number + 1) * options.tp):
        first = rank * width % len(place.cpus)
        shares.append(",".join(str(cpu) for cpu in place.cpus[first : first + width]))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(shares)}


def _pool_options(options: LaunchOptions, place: Place) -> dict[str, Any]:
    """The store's options in the connector. A local pool without a name lies in the launch's own folder and goes with it."""
    if options.backend != "local":
        return {"backend": options.backend}
    chosen: dict[str, Any] = {"backend": "local", "local_dram_size": options.dram}
    if options.pool is not None:
        return {**chosen, "local_pool_name": options.pool}
    return {**chosen, "local_pool_name": "up", "local_pool_root": place.shared}


def _service(options: LaunchOptions) -> PoolService | None:
    """Together, each engine rank gives its share of the memory; separated, an owner gives all. Yuanrong's worker always does."""
    if options.backend == "local":
        return None
    if options.mode == "separated" or options.backend == "yuanrong":
        return PoolService(options.backend, options.dram, 0)
    return PoolService(options.backend, 0, options.dram // (len(options.engines) * options.tp))


def _proxy(options: LaunchOptions, place: Place, url: str) -> Process:
    command = [place.python, "-c", PROXY_CODE, "--host", options.host, "--port", str(place.ports["--port"])]
    for side, flag in (("prefiller", "--prefill-port"), ("decoder", "--decode-port")):
        command += [f"--{side}-hosts", HERE, f"--{side}-ports", str(place.ports[flag])]
    env, ports = {"KVPOOL_SECRET": place.secret}, {"--port": place.ports["--port"]}
    return Process("proxy", tuple(command), f"{url}/health", env, ports)


def _in_url(host: str) -> str:
    """How this host reaches what listens on ``host``."""
    if host in WILDCARDS:
        return HERE
    return f"[{host}]" if ":" in host else host
