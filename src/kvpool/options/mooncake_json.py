"""mooncake.json with the environment variables that win over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.jsonfile import read_json
from kvpool.options.mooncake_rules import FABRIC_MEMORY, check_mooncake
from kvpool.options.mooncake_ssd import check_ssd
from kvpool.options.scalars import Bool, Form, choice, read_address, read_size, size, text

__all__ = ["DEFAULT_TENANT", "FABRIC_MEMORY", "GIB", "MooncakeOptions", "read_mooncake"]

GIB = 1 << 30
DEFAULT_TENANT = "default"
_OVERRIDES = {"master_server_address": "MOONCAKE_MASTER", "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE"}


def _read_master(value: object) -> str:
    if isinstance(value, str) and value.strip().startswith("etcd://") and len(value.strip()) > len("etcd://"):
        return value.strip()
    return read_address(value)


def _read_metadata_server(value: object) -> str:
    if not isinstance(value, str) or value.strip() != "P2PHANDSHAKE":
        raise ValueError
    return value.strip()


def _read_tenant(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip() or DEFAULT_TENANT


class MooncakeOptions(OptionModel):
    """The client side of a Mooncake store; sizes in bytes, per rank."""

    metadata_server: Annotated[
        str, Form('"P2PHANDSHAKE": engines find each other without a metadata server', _read_metadata_server)
    ] = Field("P2PHANDSHAKE", description="Always P2PHANDSHAKE.")
    protocol: Annotated[Literal["ascend", "rdma", "tcp"], choice("ascend", "rdma", "tcp")] = Field(
        "ascend", description="Transport: ascend on NPUs, tcp and rdma anywhere. Blanks and case do not matter."
    )
    device_name: Annotated[str, text("a string", r"[^\x00-\x1f]*")] = Field("", description="Network devices; empty for ascend.")
    master_server_address: Annotated[str, Form('"<host>:<port>" or "etcd://…"', _read_master)] = Field(
        description="The Mooncake master. MOONCAKE_MASTER wins over it."
    )
    global_segment_size: Annotated[int, size()] = Field(
        GIB, description="Memory that each rank gives to the pool; whole GB. MOONCAKE_GLOBAL_SEGMENT_SIZE wins over it."
    )
    local_buffer_size: Annotated[int, size()] = Field(GIB, description="Staging buffer per rank; not used (0) with fabric memory.")
    preferred_segment: Bool = Field(False, description="Prefer the own segment for what is stored.")
    prefer_alloc_in_same_node: Bool = Field(True, description="Prefer segments of the own node.")
    enable_ssd_offload: Bool = Field(False, description="Second tier on disk; the master must run with --enable_offload=true.")
    ssd_offload_path: Annotated[str | None, text("an absolute path of an existing directory", r"[^\x00]*")] = Field(
        None,
        description="Directory of that tier: absolute, existing, writable, no links, no `..`. Judged only when it is on.",
    )
    tenant_id: Annotated[str, Form("a string", _read_tenant)] = Field(
        DEFAULT_TENANT,
        description="Namespace and quota name without blanks around it; empty is default. Others need Mooncake >= 0.3.12.",
    )

    @property
    def tenant_argument(self) -> dict[str, str]:
        """What to hand to the library's setup: nothing for the default tenant, so that versions without tenants work."""
        return {} if self.tenant_id == DEFAULT_TENANT else {"tenant_id": self.tenant_id}


def read_mooncake(content: str, path: str, env: Mapping[str, str], deployment: Deployment) -> Reading[MooncakeOptions]:
    """The effective options; OptionError naming file, key and accepted form."""
    raw = read_json(content, path)
    fabric = env.get(FABRIC_MEMORY) == "1" and str(raw.get("protocol") or "ascend").strip().lower() == "ascend"
    ssd_off = raw.get("enable_ssd_offload") in (None, False, 0) or str(raw["enable_ssd_offload"]).strip().lower() in ("false", "0")
    if ssd_off and not isinstance(raw.get("ssd_offload_path"), str):
        raw.pop("ssd_offload_path", None)
    fills: dict[str, object] = {key: env[variable] for key, variable in _OVERRIDES.items() if env.get(variable)}
    if fabric:
        fills["local_buffer_size"] = 0
    names = {**_OVERRIDES, "local_buffer_size": FABRIC_MEMORY}
    reading = read_fields(
        MooncakeOptions,
        raw,
        origin=f"file {path}",
        where=path,
        fills=fills,
        fill_sources={key: f"environment {names[key]}" for key in fills},
    )
    options = reading.options
    warnings = [*reading.warnings, *_overridden(raw, options, fills, names)]
    warnings += _check_alignment(options, fabric, reading.sources)
    if options.enable_ssd_offload:
        warnings += check_ssd(options.ssd_offload_path, path, env, deployment, fabric=fabric)
    warnings += check_mooncake(options, path, env, deployment)
    return Reading(options, warnings, reading.sources)


def _overridden(
    raw: Mapping[str, object], options: MooncakeOptions, fills: Mapping[str, object], names: Mapping[str, str]
) -> list[str]:
    """One line for each key of the file that another value wins over."""
    lines = []
    for key in fills:
        written, effective = raw.get(key), getattr(options, key)
        if written is None or written == effective or (key.endswith("_size") and _same_size(written, effective)):
            continue
        lines.append(f"{key}: {names[key]} wins ({effective}) over the file ({written})")
    return lines


def _same_size(written: object, effective: int) -> bool:
    try:
        return read_size(written) == effective
    except ValueError:
        return False


def _check_alignment(options: MooncakeOptions, fabric: bool, sources: Mapping[str, str]) -> list[str]:
    if options.global_segment_size % GIB == 0:
        return []
    reason = "is not a multiple of 1GB"
    if fabric:
        source = sources["global_segment_size"]
        raise OptionError("global_segment_size", options.global_segment_size, f"{reason}, which fabric memory needs", where=source)
    return [f"global_segment_size={options.global_segment_size} {reason}"] if options.protocol == "ascend" else []
