"""`kv_connector_extra_config` of AscendStoreConnector as a typed value. How fields depend on one another is in ``ascend_rules``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvpool.options.fields import OptionModel
from kvpool.options.scalars import (
    ABSOLUTE_PATH,
    PARTITION,
    Bool,
    Form,
    Milliseconds,
    choice,
    integer,
    name,
    read_int,
    read_label,
    size,
    text,
)

BackendName = Literal["local", "mooncake", "memcache", "yuanrong"]
BACKENDS: tuple[BackendName, ...] = ("local", "mooncake", "memcache", "yuanrong")
MIN_DRAM_SIZE = 1 << 20
INTERNAL = ("backend_reason",)
"""Fields that are results, not keys."""


def _read_layers(value: object) -> tuple[int, ...] | Literal["all"]:
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(read_int(layer) for layer in value)


Layers = Annotated[
    tuple[int, ...] | Literal["all"], Form('a list of layer numbers (negative ones count from the end) or "all"', _read_layers)
]


class AscendStoreOptions(OptionModel):
    """Every option of AscendStoreConnector, effective and valid."""

    backend: Annotated[BackendName, choice(*BACKENDS)] = Field(
        "local",
        description="The store. Unset: `mooncake` where MOONCAKE_CONFIG_PATH is set, else `local`; a start-up warning says which, "
        "and a configuration that hints at another store is refused.",
    )
    backend_reason: str = Field("default", description="Why this backend was chosen (a result, not a key).")
    lookup_rpc_port: Annotated[str | int, Form("a string or an integer", read_label)] = Field(
        0, description="A label only, kept for compatibility: two instances on a host never collide, whatever it says."
    )
    load_async: Bool = Field(
        False, description="Load in the background while other requests run. Only the local store can load synchronously."
    )
    consumer_is_to_put: Bool = Field(False, description="A kv_consumer stores what it computes.")
    consumer_is_to_load: Bool = Field(False, description="A kv_consumer loads from the pool.")
    use_layerwise: Bool = Field(False, description="Save and load layer by layer (kv_producer and kv_both). Not available yet.")
    save_decode_cache: Bool = Field(False, description="A kv_producer or kv_both also stores the blocks that decoding fills.")
    discard_partial_chunks: Bool = Field(True, description="Accepted without effect: partial blocks are never stored.")
    prefill_pp_size: Annotated[int, integer(1)] = Field(
        1,
        description="Pipeline stages of the prefill side, for a consumer that stores. Unset: the partition counts them.",
    )
    prefill_pp_layer_partition: Annotated[tuple[int, ...] | None, PARTITION] = Field(
        None,
        description="Layers per prefill pipeline stage; as many numbers as prefill_pp_size, adding up to the layers of the model.",
    )
    prefill_tp_size: Annotated[int | None, integer(1)] = Field(
        None, description="TP size of the prefill side: a kv_consumer with consumer_is_to_put stores for its ranks."
    )
    decode_tp_size: Annotated[int | None, integer(1)] = Field(
        None, description="TP size of the decode side; compared with prefill_tp_size and with the engine."
    )
    qos_priority: Annotated[int | None, integer(0, 4)] = Field(
        None,
        description="Transfer priority, larger is more important (mooncake, memcache). Wins over ASCEND_GLOBAL_RESOURCE_CONFIG.",
    )
    layerwise_num_shared_buffers: Annotated[int | None, integer(1)] = Field(
        None,
        description="Device buffers that the layers share. Unset: one per layer, nothing is shared. Too many: clamped.",
    )
    layerwise_independent_layers: Layers = Field((0,), description="Layers that keep a buffer of their own; `all` shares nothing.")
    layerwise_prefetch_layers: Annotated[int | None, integer(1)] = Field(
        None, description="Layers loaded ahead. Unset: min(shared buffers, 8)."
    )
    layerwise_max_transfer_blocks: Annotated[int, integer(0)] = Field(0, description="Most blocks per copy call; 0 is unlimited.")
    layerwise_max_transfer_bytes: Annotated[int, size()] = Field(0, description="Most bytes per copy descriptor; 0 is unlimited.")
    h2d_stagger_us: Annotated[int, integer(0)] = Field(0, description="Accepted without effect: loads are not staggered.")
    ascend_local_comm_res_path: Annotated[str | None, ABSOLUTE_PATH] = Field(
        None, description="Directory of ub_endpoint_npu_<device>.json (NPU stores only), exported as ASCEND_LOCAL_COMM_RES."
    )
    cache_namespace: Annotated[str | None, name()] = Field(
        None, description="Names the model identity in keys. Unset: a digest of the model's configuration and weights."
    )
    min_hit_tokens: Annotated[int, integer(0)] = Field(0, description="Shorter hits are not worth a load and count as misses.")
    local_pool_name: Annotated[str, name()] = Field(
        "default", description="Pool of the local store; engines of one host share it by name."
    )
    local_pool_root: Annotated[str | None, ABSOLUTE_PATH] = Field(
        None, description="Directory that holds the pools of the local store. Unset: /dev/shm/kvpool-<uid>."
    )
    local_dram_size: Annotated[int, size(MIN_DRAM_SIZE, text=", at least 1MB")] = Field(
        4 << 30, description="Memory of the local pool, for all engines of the host together. The first engine's size wins."
    )
    local_on_last_close: Annotated[Literal["keep", "remove"], choice("keep", "remove")] = Field(
        "keep", description="What becomes of the local pool when its last user closes it."
    )
    enable_ssd_offload: Bool = Field(
        False,
        description="Second tier of the local store on a disk: what leaves memory stays there, over restarts and reboots.",
    )
    ssd_offload_path: Annotated[str | None, text("an absolute path of an existing directory", r"[^\x00]*")] = Field(
        None,
        description="Directory of that tier: absolute, existing, writable, no links, no `..`; each pool makes a folder of its own "
        "in it. Judged only when the tier is on.",
    )
    local_ssd_size: Annotated[int | None, size(MIN_DRAM_SIZE, text=", at least 1MB")] = Field(
        None, description="Room of that tier, for all engines of the host together. Required when it is on."
    )
    local_ssd_high_watermark: Annotated[int, integer(1, 100)] = Field(
        95, description="Percent of that room above which its least recently used objects are dropped."
    )
    local_ssd_low_watermark: Annotated[int, integer(1, 100)] = Field(90, description="Percent down to which they are dropped.")
    local_ssd_admission: Annotated[Literal["all", "second_sight"], choice("all", "second_sight")] = Field(
        "all",
        description="What is copied to the disk: everything, or only what was asked for or stored again after it had been stored. "
        "The latter wears the disk less.",
    )
    local_dram_high_watermark: Annotated[int, integer(0, 100)] = Field(
        80,
        description="With the tier on: percent of the memory above which what is used least recently is copied to the disk, ahead "
        "of its eviction.",
    )
    local_dram_low_watermark: Annotated[int, integer(0, 100)] = Field(
        70,
        description="Percent of the memory down to which it is copied: the rest is free, or can be evicted without loss. With 0 "
        "for both, everything is copied at once.",
    )
    lookup_wait_ms: Annotated[int, integer(0, 1000)] = Field(
        2,
        description="Longest wait of the scheduler for lookups in one step; then it asks again. Up to 5 ms where the step before "
        "had nothing to compute; 0: never.",
    )
    lookup_timeout_ms: Milliseconds = Field(1000, description="A lookup that takes longer is unknown and counts as a miss.")
    load_timeout_ms: Milliseconds = Field(30000, description="A load that takes longer has failed.")
    save_timeout_ms: Milliseconds = Field(30000, description="A save that takes longer is given up.")
    lease_ms: Milliseconds = Field(60000, description="How long a hit is protected from eviction. Longer than load_timeout_ms.")
    breaker_failures: Annotated[int, integer(1, 1_000_000)] = Field(
        5, description="Failures in a row after which the store is bypassed."
    )
    breaker_cooldown_ms: Milliseconds = Field(5000, description="Time until a bypassed store is probed again.")
    max_pinned_save_percent: Annotated[int, integer(1, 90)] = Field(
        10, description="Share of the KV blocks that saves may pin at most; beyond it saves are dropped and counted."
    )
    zero_hit_alarm_lookups: Annotated[int, integer(0)] = Field(
        100,
        description="Lookups without a single hit after which a line says why that may be: a warning where others save; 0 is off.",
    )
    negative_cache_entries: Annotated[int, integer(0, 100_000_000)] = Field(
        65536, description="Keys remembered as failed or missing."
    )
    negative_cache_ms: Milliseconds = Field(30000, description="How long they are remembered.")
    fault_plan_path: Annotated[str | None, ABSOLUTE_PATH] = Field(
        None, description="For tests only: a file of faults that the store is made to show."
    )
