"""The peers that run on CPUs, each with its servers and in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.engines import Setup, local_pool
from benchmarks.overlay import overlay
from benchmarks.processes import server
from benchmarks.system_libraries import library_path
from kvpool.ops.services.ports import free_ports

MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "msgpack==1.2.4")
# Its wheel is linked with the library of InfiniBand, also where only TCP is used.
VERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
LMCACHE = (
    "lmcache==0.5.6",
    "sortedcontainers==2.4.0",
    "aiofile==3.12.3",
    "caio==0.12.10",
    "aiofiles==25.1.0",
    "redis==8.1.0",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
)
SEGMENT_OWNER = Path(__file__).with_name("segment_owner.py")


def connector(name: str, **extra: object) -> dict[str, object]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def join(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))


@contextmanager
def kvpool(nbytes: int) -> Iterator[Setup]:
    with local_pool("bench-peers", nbytes) as setup:
        yield setup


@contextmanager
def example(nbytes: int) -> Iterator[Setup]:
    """vLLM's own: a safetensors file per layer and prompt, in shared memory."""
    folder = tempfile.mkdtemp(prefix="kvpool-bench-example-", dir="/dev/shm")
    try:
        yield Setup("example", connector("ExampleConnector", shared_storage_path=folder))
    finally:
        shutil.rmtree(folder)


@contextmanager
def mooncake(nbytes: int) -> Iterator[Setup]:
    """Mooncake over loopback TCP: a master, and a process that owns the memory and outlives the engines."""
    packages = overlay("mooncake", MOONCAKE)
    libraries = library_path(packages.with_name(f"{packages.name}-libraries"), "libibverbs.so.1", VERBS)
    env = {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": join(libraries, os.environ.get("LD_LIBRARY_PATH"))}
    port, metrics = free_ports(2)
    master = [sys.executable, str(packages / "bin" / "mooncake_master"), f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    address = f"127.0.0.1:{port}"
    owner = [sys.executable, str(SEGMENT_OWNER), address, str(nbytes)]
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "256MB",
    }
    with tempfile.NamedTemporaryFile("w", prefix="mooncake-", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        with server([*master, f"--metrics_port={metrics}"], env, port), server(owner, env, says="ready"):
            given = {"MOONCAKE_CONFIG_PATH": file.name, "LD_LIBRARY_PATH": env["LD_LIBRARY_PATH"]}
            yield Setup("mooncake", connector("MooncakeStoreConnector"), given, packages)


@contextmanager
def lmcache(nbytes: int) -> Iterator[Setup]:
    """LMCache in multi-process mode; its server reads the engine's memory through the engine, as there is no GPU."""
    packages = overlay("lmcache", LMCACHE)
    port, http = free_ports(2)
    size = -(-nbytes // (1 << 30))
    options = f"--host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb {size}"
    policy = "--eviction-policy LRU --chunk-size 256 --supported-transfer-mode engine_driven --disable-observability"
    command = [sys.executable, str(packages / "bin" / "lmcache"), "server", *options.split(), *policy.split()]
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    with server(command, {"PYTHONPATH": str(packages)}, http):
        yield Setup("lmcache", connector("LMCacheMPConnector", **extra), {}, packages)


PEERS: dict[str, Callable[[int], AbstractContextManager[Setup]]] = {"example": example, "mooncake": mooncake, "lmcache": lmcache}
