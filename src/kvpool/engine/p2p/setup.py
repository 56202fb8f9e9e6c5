"""What both sides of MooncakeConnectorV1 need to know of the engine they run in, read once from vLLM's configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version  # type: ignore[attr-defined]

import kvpool
from kvpool.core.hits import GroupSpec
from kvpool.engine.groups import pool_groups
from kvpool.engine.p2p.surroundings import pool_beside
from kvpool.engine.setup import check_version
from kvpool.engine.surroundings import describe_deployment, find_parent
from kvpool.options import OptionError
from kvpool.options.deployment import Deployment
from kvpool.options.prefill_decode import PullOptions, read_pull
from kvpool.options.pull_rules import PullFacts, judge_pull
from kvpool.options.scalars import integer
from kvpool.transfer import EngineSettings
from kvpool.transfer.secret import Secret, find_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")


@dataclass(frozen=True)
class PullSetup:
    """Typed facts of one engine. ``port`` is where this data-parallel rank of prefill listens."""

    options: PullOptions
    producer: bool
    groups: list[GroupSpec]
    unit: int  # tokens per block hash
    world_size: int
    num_blocks: int
    tp_size: int
    engine_id: str
    host: str
    port: int
    secret: Secret
    engine: str
    engine_reason: str
    deadline_s: float  # of one pull or publish
    hold_s: int  # how long prefill keeps what nobody has read
    policy: str
    pool: Mapping[str, str]  # the AscendStoreConnector beside us, if there is one

    def engine_settings(self, device: str) -> EngineSettings:
        options = self.options
        root = Path(options.transfer_root) if options.transfer_root is not None else None
        return EngineSettings(
            self.host, self.producer, device, options.transfer_protocol, root, options.transfer_buffer_size, self.hold_s
        )


def read_pull_setup(vllm_config: VllmConfig, kv_config: KVCacheConfig, log: bool) -> PullSetup:
    """ValueError or RuntimeError in one line where this engine cannot take part. Warnings go to the log where ``log``."""
    check_version(vllm_version)
    logging.getLogger("kvpool").parent = logging.getLogger("vllm")
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None or transfer.kv_role is None:
        raise ValueError("kvpool: kv_transfer_config needs a kv_role")
    deployment = describe_deployment(vllm_config)
    if parallel.data_parallel_size == 1:
        deployment = replace(deployment, dp=None)  # vLLM hides it from data-parallel ranks of dense models
    port = _port(transfer.kv_port)
    reading = read_pull(transfer.kv_connector_extra_config, transfer.kv_role, port, deployment, "")
    options, producer = reading.options, transfer.kv_role == "kv_producer"
    _check_parallel(vllm_config, options, producer, deployment)
    facts = judge_pull(options, reading.sources, os.environ, deployment)
    parent = find_parent()
    setup = PullSetup(
        options=options,
        producer=producer,
        groups=pool_groups(kv_config),
        unit=kv_config.hash_block_size or 0,
        world_size=parallel.world_size,
        num_blocks=kv_config.num_blocks,
        tp_size=parallel.tensor_parallel_size,
        engine_id=str(transfer.engine_id),
        host=facts.place.host,
        port=port + parallel.data_parallel_index * parallel.world_size,
        secret=find_secret(os.environ, facts.place.host),
        engine=facts.chosen.engine,
        engine_reason=facts.chosen.reason,
        deadline_s=facts.deadline_s,
        hold_s=facts.hold_s,
        policy=(parent or transfer).kv_load_failure_policy,
        pool=pool_beside(parent, deployment),
    )
    if log:
        _log_start(setup, facts, reading.warnings)
    return setup


def _check_parallel(vllm_config: VllmConfig, options: PullOptions, producer: bool, deployment: Deployment) -> None:
    if deployment.context_parallel:
        raise ValueError("kvpool: context parallelism is not available yet (prefill/decode_context_parallel_size must be 1)")
    side, name = (options.prefill, "prefill") if producer else (options.decode, "decode")
    index = vllm_config.parallel_config.data_parallel_index
    if index >= side.dp_size:
        raise OptionError("dp_size", side.dp_size, f"but this is data-parallel rank {index}, counted from 0", where=name)


def _port(value: object) -> int:
    form = integer(1, 65535)
    try:
        return form.read(value)
    except ValueError:
        raise OptionError("kv_port", value, f"expected {form.accepted}") from None


def _log_start(setup: PullSetup, facts: PullFacts, warnings: list[str]) -> None:
    logger.info("kvpool %s: its MooncakeConnectorV1 is the active one", kvpool.__version__)
    for warning in [*warnings, *facts.warnings, *facts.notes]:
        logger.warning("kvpool: %s", warning)
    logger.info(
        "kvpool: transfers by %s (%s), %s side, secret: %s, policy %s%s",
        setup.engine,
        setup.engine_reason,
        "prefill" if setup.producer else "decode",
        setup.secret.kind,
        setup.policy,
        f", listening on {setup.host}:{setup.port} ({facts.place.source})" if setup.producer else "",
    )
