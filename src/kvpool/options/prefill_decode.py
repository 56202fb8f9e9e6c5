"""Extra config of the connectors that move KV from prefill to decode: MooncakeConnectorV1 and SfaRemoteD2HConnector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvpool.options.deployment import Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields, unknown_key
from kvpool.options.scalars import ABSOLUTE_PATH, PARTITION, Bool, choice, integer, name, size, text

MAX_PORT = 65535
MAX_TIMEOUT_MS = 3_600_000
TRANSFER_TIMEOUT = "ASCEND_TRANSFER_TIMEOUT"


class SideSizes(OptionModel):
    """Parallel sizes of the prefill or the decode side."""

    tp_size: Annotated[int, integer(1)] = Field(description="Tensor parallel size; must be the real one of that side.")
    dp_size: Annotated[int, integer(1)] = Field(description="Data parallel size; must be the real one of that side.")
    pp_size: Annotated[int, integer(1)] = Field(1, description="Pipeline parallel size; 1 on the decode side.")
    pp_layer_partition: Annotated[tuple[int, ...] | None, PARTITION] = Field(None, description="Layers per stage (prefill side).")


ENGINES = ("auto", "local_host", "process_vm", "mooncake")
MIN_BUFFER = 1 << 20
_HOST = text("a host name or address", r"[A-Za-z0-9._:-]{1,253}")


class TransferOptions(OptionModel):
    """MooncakeConnectorV1: how KV and messages travel. Keys of kvpool's own, with defaults that fit one host and several."""

    transfer_engine: Annotated[Literal["auto", "local_host", "process_vm", "mooncake"], choice(*ENGINES)] = Field(
        "auto",
        description="Who moves the bytes; the same on prefill and decode. `auto`: `local_host` where transfer_host is loopback, "
        "else `mooncake`. `process_vm` is one copy instead of two, where the kernel allows it.",
    )
    transfer_protocol: Annotated[Literal["tcp", "rdma", "ascend"], choice("tcp", "rdma", "ascend")] = Field(
        "tcp", description="Of transfer_engine `mooncake`; the same on prefill and decode."
    )
    transfer_host: Annotated[str | None, _HOST] = Field(
        None,
        description="Where prefill listens and is found. Unset: VLLM_HOST_IP, else HCCL_IF_IP, else 127.0.0.1. Decode needs it to "
        "tell whether both sides are on one host.",
    )
    transfer_buffer_size: Annotated[int, size(MIN_BUFFER, text=" of at least 1MB")] = Field(
        2 << 30, description="Shared memory of `local_host` for KV on its way; the same on all prefill engines of a host."
    )
    transfer_root: Annotated[str | None, ABSOLUTE_PATH] = Field(
        None, description="Folder of that memory; unset: /dev/shm/kvpool-<uid>. Must exist, on a filesystem of this host."
    )
    transfer_require_auth: Bool = Field(
        False, description="Refuse to start off loopback without KVPOOL_SECRET, instead of warning."
    )
    cache_namespace: Annotated[str | None, name()] = Field(
        None, description="Identity of the model, in place of a digest of its configuration and weights."
    )


class PullOptions(TransferOptions):
    """MooncakeConnectorV1: decode pulls from prefill."""

    prefill: SideSizes = Field(description="Sizes of the prefill side.")
    decode: SideSizes = Field(description="Sizes of the decode side; its TP must divide that of prefill.")


class RemoteD2HOptions(OptionModel):
    """SfaRemoteD2HConnector: decode reads each layer out of prefill's memory while it is computed."""

    transfer_backend: Annotated[Literal["memfabric"], choice("memfabric")] = Field(description="The transfer library.")
    memfabric_transfer_protocol: Annotated[
        Literal["sdma", "device_rdma", "device_urma"], choice("sdma", "device_rdma", "device_urma")
    ] = Field("sdma", description="Data path; the same on prefill and decode. sdma or device_rdma on A3, device_urma on A5.")
    use_layerwise: Bool = Field(True, description="Accepted without effect: transfers are always layer by layer.")


def read_pull(extra: Mapping[str, object], kv_role: str, kv_port: int, deployment: Deployment, where: str) -> Reading[PullOptions]:
    """Options of MooncakeConnectorV1; both sizes are mandatory and checked against what is known of this engine."""
    sides: dict[str, SideSizes] = {}
    known = PullOptions.keys()
    warnings = [unknown_key(key, known, where) for key in extra if key not in known]
    for side in ("prefill", "decode"):
        raw = extra.get(side)
        if not isinstance(raw, Mapping):
            raise OptionError(side, raw, "is required: an object with tp_size and dp_size", where=where)
        reading = read_fields(SideSizes, raw, where=f"{where}: {side}" if where else side)
        sides[side] = reading.options
        warnings += reading.warnings
    transfer_keys = set(TransferOptions.keys())
    flat = read_fields(TransferOptions, {key: extra[key] for key in extra if key in transfer_keys}, where=where)
    prefill, decode = sides["prefill"], sides["decode"]
    if decode.pp_size != 1:
        raise OptionError("pp_size", decode.pp_size, "must be 1 on the decode side", where=f"{where}: decode")
    if prefill.tp_size % decode.tp_size:
        reason = f"must be a multiple of the decode side's {decode.tp_size}"
        raise OptionError("tp_size", prefill.tp_size, reason, where=f"{where}: prefill")
    if prefill.pp_layer_partition is not None and len(prefill.pp_layer_partition) != prefill.pp_size:
        reason = f"names {len(prefill.pp_layer_partition)} stages, but pp_size is {prefill.pp_size}"
        raise OptionError("pp_layer_partition", list(prefill.pp_layer_partition), reason, where=f"{where}: prefill")
    _check_own_side(sides, kv_role, kv_port, deployment, where)
    options = PullOptions(prefill=prefill, decode=decode, **flat.options.model_dump(exclude_none=True))
    return Reading(options, warnings, {**flat.sources, "prefill": "JSON", "decode": "JSON"})


def _check_own_side(sides: Mapping[str, SideSizes], kv_role: str, kv_port: int, deployment: Deployment, where: str) -> None:
    name = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role)
    if name is None:
        raise OptionError("kv_role", kv_role, "expected kv_producer or kv_consumer", where=where)
    side = sides[name]
    for key, real in (("tp_size", deployment.tp), ("dp_size", deployment.dp), ("pp_size", deployment.pp)):
        if real is not None and getattr(side, key) != real:
            raise OptionError(key, getattr(side, key), f"but this engine runs with {real}", where=f"{where}: {name}")
    if name == "decode" and (deployment.pcp or 1) > 1:
        raise OptionError("kv_role", kv_role, "decode does not work with prefill context parallelism", where=where)
    check_ports(kv_port, side.dp_size * side.tp_size * side.pp_size * (deployment.pcp or 1), where)


def read_remote_d2h(
    extra: Mapping[str, object], kv_role: str, kv_port: int, deployment: Deployment, where: str
) -> Reading[RemoteD2HOptions]:
    """Options of SfaRemoteD2HConnector."""
    reading = read_fields(RemoteD2HOptions, extra, where=where)
    if kv_role == "kv_both":
        raise OptionError("kv_role", kv_role, "expected kv_producer or kv_consumer", where=where)
    if kv_role == "kv_consumer":
        check_ports(kv_port, (deployment.dp or 1) * (deployment.tp or 1), where)
    warnings = (
        [f"{where}: use_layerwise has no effect: transfers are always layer by layer"]
        if extra.get("use_layerwise") is False
        else []
    )
    return Reading(reading.options, reading.warnings + warnings, reading.sources)


def check_ports(kv_port: int, count: int, where: str) -> None:
    """OptionError unless ``count`` ports from ``kv_port`` on exist."""
    if kv_port + count - 1 > MAX_PORT:
        raise OptionError(
            "kv_port", kv_port, f"{count} ports are used from there on, and the last must not exceed {MAX_PORT}", where=where
        )


def transfer_timeout_ms(env: Mapping[str, str]) -> int:
    """Longest time of one transfer: ASCEND_TRANSFER_TIMEOUT, else what the RDMA retries can take plus three seconds."""

    def read(variable: str, default: int) -> int:
        form = integer(1, MAX_TIMEOUT_MS)
        try:
            return form.read(env.get(variable) or default)
        except ValueError:
            raise OptionError(variable, env[variable], f"expected {form.accepted}") from None

    if env.get(TRANSFER_TIMEOUT):
        return read(TRANSFER_TIMEOUT, MAX_TIMEOUT_MS)
    exponent, retries = read("HCCL_RDMA_TIMEOUT", 20), read("HCCL_RDMA_RETRY_CNT", 7)
    return int(4.096 * 2 ** min(exponent, 32) * retries) // 1000 + 3000


def check_sparse_role(kv_role: str, sparse_enabled: bool, where: str) -> None:
    """SfaRemoteD2HConnector and sparse offload go together on decode, and only there."""
    if sparse_enabled != (kv_role == "kv_consumer"):
        needs = "needs" if kv_role == "kv_consumer" else "excludes"
        raise OptionError(f"a {kv_role} of SfaRemoteD2HConnector", UNSET, f"{needs} sparse_kv_offload_config.enabled", where=where)
