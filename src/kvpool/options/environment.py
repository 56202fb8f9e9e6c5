"""Environment variables: which ones matter, who reads them, and the two that options are merged with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.options.errors import OptionError
from kvpool.options.jsonfile import JsonError, read_json
from kvpool.options.secret import SECRET_VARIABLE

RESOURCE_CONFIG = "ASCEND_GLOBAL_RESOURCE_CONFIG"
QOS_FIELD = "store.comm_resource_config.qos"
MEMCACHE_QOS = "MF_DEVICE_UB_QOS"
HASH_SEED = "PYTHONHASHSEED"
DEFAULT_HASH = "sha256"
HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Variable(NamedTuple):
    name: str
    reader: str
    meaning: str


VARIABLES = (
    Variable(
        HASH_SEED,
        "vLLM",
        "Seed of the block hashes. The same, or unset, on all instances that share a pool; a must for the xxhash algorithms.",
    ),
    Variable(
        SECRET_VARIABLE,
        "kvpool",
        "Shared secret of prefill, decode and proxy, of at least 16 characters: what they tell each other is signed with it. "
        "Set it off loopback.",
    ),
    Variable("KVPOOL_ADMIN_TOKEN", "kvpool", "Token of the proxy's administration; without it that is open on loopback only."),
    Variable("MOONCAKE_CONFIG_PATH", "kvpool", "Path of mooncake.json. Chooses the mooncake backend where none is set."),
    Variable("MOONCAKE_MASTER", "kvpool", "Address of the Mooncake master; wins over master_server_address."),
    Variable("MOONCAKE_GLOBAL_SEGMENT_SIZE", "kvpool", "Wins over global_segment_size."),
    Variable(
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
        "Mooncake",
        "SSD read and write buffer per rank in bytes, digits only. Default 1342177280.",
    ),
    Variable("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "Mooncake", "Disk quota in bytes; 0 is 90 % of the disk."),
    Variable("MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY", "Mooncake", "none, fifo or lru. Default none."),
    Variable(
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "Mooncake", "Disk use per rank that is reported to the master. Default 2 TB."
    ),
    Variable(
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES",
        "Mooncake",
        "Bytes, digits only, that are gathered before they go to the disk; where unset, an eighth of the segment, 4 to 256 MiB.",
    ),
    Variable("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "Mooncake", "Seconds between reports of the disk tier; 1 where unset."),
    Variable("KVPOOL_MOONCAKE_CLIENT_TTL", "kvpool", "The master's client_ttl in seconds; a client with a disk tier waits for it."),
    Variable("MC_RPC_TIMEOUT_MS", "Mooncake", "Longest call to the master; kvpool sets 4000 where it is unset."),
    Variable("MC_RPC_CONNECT_TIMEOUT_MS", "Mooncake", "Longest connect to the master; kvpool sets 2000 where it is unset."),
    Variable("MC_STORE_CLIENT_SETUP_RETRIES", "Mooncake", "Tries to reach the master at start; kvpool sets 3 where it is unset."),
    Variable("MMC_LOCAL_CONFIG_PATH", "kvpool, MemCache", "Path of mmc-local.conf. Needed by the memcache backend."),
    Variable(
        "MMC_META_CONFIG_PATH",
        "MemCache, `config check`",
        "Path of mmc-meta.conf, for the meta service; compared with mmc-local.conf.",
    ),
    Variable("MEMFABRIC_HYBRID_EXTEND_LIB_PATH", "MemFabric", "Directory of the libraries that device protocols load."),
    Variable(MEMCACHE_QOS, "MemCache", "Transfer priority; set from qos_priority."),
    Variable("YR_CONFIG_PATH", "kvpool", "Path of yuanrong.json. This or DS_WORKER_ADDR is needed by the yuanrong backend."),
    Variable("DS_WORKER_ADDR", "kvpool", "Fills worker_addr where yuanrong.json has none."),
    Variable("DS_ENABLE_EXCLUSIVE_CONNECTION", "kvpool", "0 or 1. Fills enable_exclusive_connection."),
    Variable("DS_ENABLE_REMOTE_H2D", "kvpool", "0 or 1. Fills enable_remote_h2d where yuanrong.json has none."),
    Variable(
        "DS_RH2D_LINK_TYPE", "Yuanrong", "HCCS where the workers run with that link type (a must for HIXL), else ROCE or unset."
    ),
    Variable("DATASYSTEM_CLIENT_LOG_DIR", "kvpool, Yuanrong", "Directory of its client logs; absolute."),
    Variable("ASCEND_ENABLE_USE_FABRIC_MEM", "kvpool, Mooncake", "1: fabric memory; sizes must then be multiples of 1GB."),
    Variable(RESOURCE_CONFIG, "kvpool, HIXL", "JSON object of transfer resources; qos_priority is merged into it."),
    Variable("ASCEND_LOCAL_COMM_RES", "HIXL", "Set by hand or from ascend_local_comm_res_path."),
    Variable("ASCEND_CONNECT_TIMEOUT", "HIXL", "Milliseconds; the store's lease must be longer."),
    Variable("ASCEND_TRANSFER_TIMEOUT", "HIXL", "Milliseconds; the store's lease must be longer."),
    Variable(
        "HCCL_RDMA_TIMEOUT", "kvpool, HCCL", "With HCCL_RDMA_RETRY_CNT the transfer timeout where ASCEND_TRANSFER_TIMEOUT is unset."
    ),
    Variable("ASCEND_BUFFER_POOL", "HIXL", "Buffers of device-to-device transfers; warm up before measuring."),
    Variable("HCCL_INTRA_ROCE_ENABLE", "HCCL", "1 on A2, and on A3 over RoCE."),
    Variable("HCCL_IF_IP", "HCCL", "Address of this node; with HCCL_, GLOO_ and TP_SOCKET_IFNAME its interface."),
    Variable(
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        "kvpool, vLLM",
        "Seconds for which prefill keeps blocks that decode has not read. Default 480.",
    ),
    Variable("VLLM_HOST_IP", "kvpool, vLLM", "Address of this host; where MooncakeConnectorV1 listens, unless transfer_host says."),
    Variable("ACL_OP_INIT_MODE", "CANN", "1 on A3 over HCCS."),
    Variable("ASCEND_RT_VISIBLE_DEVICES", "CANN", "Devices that the process may use."),
    Variable("LD_LIBRARY_PATH", "the loader", "Must find the libraries of the chosen store."),
    Variable("OPENAI_API_KEY", "the proxies", "Sent to the engines as bearer token."),
)


@dataclass(slots=True)
class Merged:
    """Variables to set before the store opens, and what to tell the operator."""

    updates: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def check_hash_algo(name: str | None) -> None:
    """OptionError for what is no --prefix-caching-hash-algo of vLLM; None is its default."""
    if name is not None and name not in HASH_ALGORITHMS:
        raise OptionError("--hash-algo", name, f"expected one of {', '.join(HASH_ALGORITHMS)}")


def hash_warning(env: Mapping[str, str], hash_algo: str | None) -> str | None:
    """With xxhash algorithms the root hash is random per process unless PYTHONHASHSEED is set; with sha256 types it is fixed."""
    if env.get(HASH_SEED) or not (hash_algo or DEFAULT_HASH).startswith("xxhash"):
        return None
    problem = f"with {hash_algo} every process hashes differently, so nothing will ever be shared"
    return f"{HASH_SEED} is not set: {problem}; set it to one value everywhere"


def hash_seed(env: Mapping[str, str]) -> str:
    """The seed of the block hashes in words, for reports."""
    seed = env.get(HASH_SEED)
    return f"{HASH_SEED}={seed}" if seed else f"{HASH_SEED} unset"


def resource_config(env: Mapping[str, str]) -> dict[str, Any]:
    """ASCEND_GLOBAL_RESOURCE_CONFIG as an object; OptionError with the position where it is none."""
    text = env.get(RESOURCE_CONFIG)
    if text is None:
        return {}
    try:
        return read_json(text, RESOURCE_CONFIG)
    except JsonError as error:
        raise OptionError(
            RESOURCE_CONFIG, text, f"is not a JSON object: line {error.line} column {error.column}: {error.problem}"
        ) from None


def merge_qos(backend: str, qos: int | None, env: Mapping[str, str]) -> Merged:
    """What ``qos_priority`` means for the environment of the chosen backend. Unset: nothing is touched."""
    merged = Merged()
    if backend == "mooncake":
        try:
            config = resource_config(env)
        except OptionError as error:
            if qos is not None:
                raise
            merged.warnings.append(f"{error}; it is left as it is")
            return merged
        if qos is not None:
            old = config.get(QOS_FIELD)
            if old is not None and old != qos:
                merged.warnings.append(f"qos_priority={qos} wins over {QOS_FIELD}={old} of {RESOURCE_CONFIG}")
            merged.updates[RESOURCE_CONFIG] = json.dumps({**config, QOS_FIELD: qos})
    elif backend == "memcache" and qos is not None:
        old = env.get(MEMCACHE_QOS)
        if old is not None and old != str(qos):
            merged.warnings.append(f"qos_priority={qos} wins over {MEMCACHE_QOS}={old}")
        merged.updates[MEMCACHE_QOS] = str(qos)
    elif qos is not None:
        merged.warnings.append(f"qos_priority={qos} has no effect with the {backend} backend")
    return merged
