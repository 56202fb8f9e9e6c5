"""yuanrong.json, with the DS_* variables filling what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvpool.options.deployment import UNKNOWN, Deployment
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.jsonfile import read_json
from kvpool.options.scalars import Address, Bool, choice, integer, read_bool
from kvpool.options.yuanrong_rules import check_yuanrong, remote_h2d_obstacle

_FILLS = {
    "worker_addr": "DS_WORKER_ADDR",
    "enable_remote_h2d": "DS_ENABLE_REMOTE_H2D",
    "enable_exclusive_connection": "DS_ENABLE_EXCLUSIVE_CONNECTION",
}


class YuanrongOptions(OptionModel):
    """The client side of a Yuanrong datasystem."""

    worker_addr: Address = Field(description="The worker of this node. DS_WORKER_ADDR fills it.")
    connect_timeout_ms: Annotated[int, integer(500)] = Field(9000, description="Longest time to connect.")
    request_timeout_ms: Annotated[int, integer(0)] = Field(0, description="Longest time of a request; 0 means connect_timeout_ms.")
    get_sub_timeout_ms: Annotated[int, integer(0)] = Field(
        0, description="How long a get waits for objects to appear; 0 is not at all."
    )
    enable_remote_h2d: Bool = Field(False, description="Remote host-to-device transfer. DS_ENABLE_REMOTE_H2D fills it.")
    enable_exclusive_connection: Bool = Field(
        False, description="A connection of its own. DS_ENABLE_EXCLUSIVE_CONNECTION fills it."
    )
    remote_h2d_transport_backend: Annotated[Literal["HIXL", "P2P_TRANSFER"], choice("HIXL", "P2P_TRANSFER")] = Field(
        "HIXL", description="HIXL where the workers run with link type HCCS, P2P_TRANSFER with ROCE."
    )
    enable_fabric_mem: Bool = Field(False, description="FabricMem mode of HIXL.")
    enable_dev_mem_pregister: Bool = Field(
        False, description="Register device memory in advance (HIXL with remote H2D, no FabricMem)."
    )
    use_layerwise: Bool = Field(False, description="Must agree with use_layerwise of the connector.")

    @property
    def request_deadline_ms(self) -> int:
        """The time that really bounds a request: the library takes connect_timeout_ms where request_timeout_ms is 0."""
        return self.request_timeout_ms or self.connect_timeout_ms

    @property
    def scheduler_client(self) -> Literal["none", "metadata"]:
        """What the scheduler opens: nothing, or with use_layerwise a client for metadata only, without remote H2D."""
        return "metadata" if self.use_layerwise else "none"

    @property
    def registers_device_memory(self) -> bool:
        """Whether device memory is registered in advance: the switch must be on and all conditions hold."""
        hixl = self.remote_h2d_transport_backend == "HIXL" and not self.enable_fabric_mem
        return self.enable_dev_mem_pregister and self.enable_remote_h2d and hixl


def read_yuanrong(
    content: str,
    path: str,
    env: Mapping[str, str],
    deployment: Deployment = UNKNOWN,
    *,
    use_layerwise: bool | None = None,
) -> Reading[YuanrongOptions]:
    """The effective options. ``use_layerwise`` is the connector's; None where there is no connector to compare with."""
    raw = read_json(content, path)
    fills: dict[str, object] = {key: env[name] for key, name in _FILLS.items() if env.get(name) and raw.get(key) is None}
    reading = read_fields(
        YuanrongOptions,
        raw,
        origin=f"file {path}",
        where=path,
        fills=fills,
        fill_sources={key: f"environment {_FILLS[key]}" for key in fills},
    )
    options = reading.options
    if use_layerwise is not None and options.use_layerwise != use_layerwise:
        reason = f"differs from use_layerwise={str(use_layerwise).lower()} of the connector"
        raise OptionError("use_layerwise", options.use_layerwise, reason, where=path)
    warnings = [*reading.warnings, *_losing_variables(raw, options, env), *_without_effect(options)]
    sources = dict(reading.sources)
    if obstacle := remote_h2d_obstacle(options, deployment):
        warnings.append(f"enable_remote_h2d falls back to false: {obstacle}")
        options = options.model_copy(update={"enable_remote_h2d": False})
        sources["enable_remote_h2d"] = f"fallback ({obstacle})"
    warnings += check_yuanrong(options, path, env, deployment)
    return Reading(options, warnings, sources)


def _losing_variables(raw: Mapping[str, object], options: YuanrongOptions, env: Mapping[str, str]) -> list[str]:
    lines = []
    for key, variable in _FILLS.items():
        effective = getattr(options, key)
        if env.get(variable) and raw.get(key) is not None and not _same(env[variable], effective):
            lines.append(f"{key}: the file wins ({effective}) over {variable} ({env[variable]})")
    return lines


def _same(written: str, effective: object) -> bool:
    if not isinstance(effective, bool):
        return written.strip() == effective
    try:
        return read_bool(written) == effective
    except ValueError:
        return False


def _without_effect(options: YuanrongOptions) -> list[str]:
    warnings = []
    if options.enable_fabric_mem and options.remote_h2d_transport_backend != "HIXL":
        warnings.append("enable_fabric_mem has no effect without remote_h2d_transport_backend HIXL")
    if options.enable_dev_mem_pregister and not options.registers_device_memory:
        warnings.append("enable_dev_mem_pregister has no effect: it needs enable_remote_h2d, HIXL and no enable_fabric_mem")
    return warnings
