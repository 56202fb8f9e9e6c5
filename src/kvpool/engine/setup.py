"""What both sides need to know of the engine they run in, read once from vLLM's configuration."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version  # type: ignore[attr-defined]

import kvpool
from kvpool.core.hits import GroupSpec, alignment
from kvpool.core.shards import layer_partition
from kvpool.core.split import Split
from kvpool.engine.groups import pool_groups
from kvpool.engine.surroundings import describe_deployment, family_warnings, find_parent
from kvpool.options import AscendStoreOptions, load_ascend_store
from kvpool.options.backend_file import BackendFile
from kvpool.options.record import StoreRecord, store_record

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")


@dataclass(frozen=True)
class EngineSetup:
    """Typed facts of one engine. ``loads`` and ``saves`` say what the role and the options let it do."""

    options: AscendStoreOptions
    groups: list[GroupSpec]
    world_size: int
    pipelined: bool  # a step that has nothing to compute may run beside others that have
    num_blocks: int
    loads: bool
    saves: bool
    load_async: bool
    save_decode: bool
    give_back: int  # tokens at the end of a hit that the engine must compute again
    split: Split | None  # the shards of a prefill side with other parallel sizes, where they are stored for it
    policy: str  # what vLLM does when a load fails: fail or recompute
    backend_file: BackendFile | None = None  # the store's own configuration, where it has one
    env_updates: Mapping[str, str] = field(default_factory=dict)  # to be set before the store opens

    @property
    def record(self) -> StoreRecord:
        """Which pool this is, to be compared with what others say."""
        return store_record(self.options.backend, self.backend_file.options if self.backend_file is not None else self.options)


def read_setup(vllm_config: VllmConfig, kv_config: KVCacheConfig, log: bool) -> EngineSetup:
    """ValueError or RuntimeError in one line where this engine cannot be served. Warnings go to the log where ``log``."""
    check_version(vllm_version)
    # Below the engine folder nothing knows vLLM: its messages take the way of vLLM's own.
    logging.getLogger("kvpool").parent = logging.getLogger("vllm")
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None or transfer.kv_role is None:
        raise ValueError("kvpool: kv_transfer_config needs a kv_role")
    role = transfer.kv_role
    loaded = load_ascend_store(
        transfer.kv_connector_extra_config,
        kv_role=role,
        env=os.environ,
        deployment=describe_deployment(vllm_config),
        kv_load_failure_policy=transfer.kv_load_failure_policy,
    )
    parent = find_parent()
    warnings = [*loaded.warnings, *family_warnings(parent)]
    policy = (parent or transfer).kv_load_failure_policy
    reason = _async_reason(vllm_config, policy, len(kv_config.kv_cache_groups))
    if log:
        _log_start(warnings, loaded.notes, policy)
        if reason and not loaded.options.load_async:
            logger.info("kvpool: loads are asynchronous, although load_async is false: %s", reason)
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise ValueError("kvpool: context parallelism is not available yet (prefill/decode_context_parallel_size must be 1)")
    options, groups = loaded.options, pool_groups(kv_config)
    consumer = role == "kv_consumer"
    return EngineSetup(
        options=options,
        groups=groups,
        world_size=parallel.world_size,
        pipelined=parallel.pipeline_parallel_size > 1,
        num_blocks=kv_config.num_blocks,
        loads=not consumer or options.consumer_is_to_load,
        saves=not consumer or options.consumer_is_to_put,
        load_async=options.load_async or bool(reason),
        save_decode=options.save_decode_cache or (consumer and options.consumer_is_to_put),
        give_back=alignment(groups) if _drafts_from_hidden_states(vllm_config) else 0,
        split=_split_for_prefill(options, vllm_config) if consumer and options.consumer_is_to_put else None,
        policy=policy,
        backend_file=loaded.backend_file,
        env_updates=loaded.env_updates,
    )


def _split_for_prefill(options: AscendStoreOptions, vllm_config: VllmConfig) -> Split | None:
    """None where prefill has our sizes, or fewer ranks than we have: what we store then stays as it is."""
    parallel, layers = vllm_config.parallel_config, vllm_config.model_config.get_total_num_hidden_layers()
    own_tp, tp = parallel.tensor_parallel_size, options.prefill_tp_size or parallel.tensor_parallel_size
    if options.prefill_pp_size == 1 and tp <= own_tp:
        return None
    partition = options.prefill_pp_layer_partition
    explicit = ",".join(map(str, partition)) if partition is not None else None
    return Split(tuple(layer_partition(layers, options.prefill_pp_size, explicit)), max(tp, own_tp))


def _async_reason(vllm_config: VllmConfig, policy: str, num_groups: int) -> str:
    """Why a load must not run inside a step here; empty when it may.

    A synchronous load is in vLLM's prefix cache before it has run, and other requests, or the next step, build on it. vLLM can only
    take that back by ending them all with an error (policy ``fail``), and only in the step that loaded.
    """
    if num_groups > 1:
        return "vLLM cannot drop a failed synchronous load of several KV-cache groups"
    if vllm_config.max_concurrent_batches > 1:
        return "the next step is planned before a failed load of this one is known"
    if policy == "recompute":
        return "other requests may build on a synchronous load before its failure is known, and vLLM recomputes only one of them"
    return ""


def _drafts_from_hidden_states(vllm_config: VllmConfig) -> bool:
    """EAGLE-like drafters: the draft KV of a block's last token depends on the next token, which the block hash does not name."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def _log_start(warnings: list[str], notes: list[str], policy: str) -> None:
    logger.info("kvpool %s: its AscendStoreConnector is the active one", kvpool.__version__)
    for note in notes:
        logger.info("kvpool: %s", note)
    for warning in warnings:
        logger.warning("kvpool: %s", warning)
    if policy == "fail":
        logger.warning(
            "kvpool: kv_load_failure_policy is 'fail', vLLM's default: a request whose KV cannot be loaded ends with an error; "
            "'recompute' (at the top level of kv-transfer-config) recomputes it instead."
        )


def check_version(version: str) -> None:
    """0.32 is supported; newer is accepted with a warning; older is refused."""
    match = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    if numbers < (0, 32):
        raise RuntimeError(f"kvpool needs vLLM 0.32 or newer, this is {version}")
    if numbers > (0, 32):
        logger.warning_once("kvpool: vLLM %s is newer than 0.32, on which kvpool is tested.", version)


def host_identity() -> str:
    """Tells hosts apart, the same in every container of one host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return os.uname().nodename
