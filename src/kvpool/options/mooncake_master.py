"""The flags of `mooncake_master`, and whether they fit the clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvpool.options.addresses import port_of
from kvpool.options.commands import Command
from kvpool.options.configfile import read_text
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.lease import check_lease
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.scalars import Bool, Form, Port, choice, integer, read_duration, text
from kvpool.options.tenants import policy_tenants

SWITCHES = ("enable_offload", "enable_multi_tenants")
MIN_CLIENT_TTL = 60


def _read_ratio(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError
    return number


Ratio = Annotated[float, Form("a number from 0 to 1", _read_ratio)]


class MasterFlags(OptionModel):
    """Flags of the master that clients depend on; all others are the master's own business."""

    port: Port = Field(50051, description="Where it listens (also --rpc_port); the port of master_server_address.")
    default_kv_lease_ttl: Annotated[int, Form("milliseconds, or a number with ms, s, m or h", read_duration)] = Field(
        10000, description="Lease of a read; larger than ASCEND_CONNECT_TIMEOUT and ASCEND_TRANSFER_TIMEOUT."
    )
    client_ttl: Annotated[int, integer(1)] = Field(10, description="Seconds a client counts as alive after its last ping.")
    eviction_high_watermark_ratio: Ratio = Field(0.9, description="Share of the memory at which eviction starts.")
    eviction_ratio: Ratio = Field(0.05, description="Share of the objects that one eviction removes.")
    enable_offload: Bool = Field(False, description="The disk tier; without it no client's SSD is used.")
    enable_multi_tenants: Bool = Field(False, description="Strict tenants; without it tenant_id keeps nothing apart.")
    tenant_quota_connector_type: Annotated[Literal["file", "etcd"], choice("file", "etcd")] = Field(
        "file", description="Where tenants and quotas stand."
    )
    tenant_quota_connector_uri: Annotated[str | None, text("a path or endpoints")] = Field(
        None, description="Path of the policy file, or endpoints of etcd; needed with strict tenants."
    )


def read_master(command: Command, where: str) -> Reading[MasterFlags]:
    """The flags; OptionError naming a flag whose value the master would refuse or misread."""
    flags: dict[str, object] = dict(command.flags)
    for switch, word in command.loose.items():
        if word.lower() not in ("true", "1"):
            reason = f"{word} is not its value: a switch is on wherever it stands; write --{switch}={word}"
            raise OptionError(f"--{switch} {word}", UNSET, reason, where=where)
    for switch in SWITCHES:
        if flags.pop(f"no{switch}", None) is not None:
            flags[switch] = "false"
    if flags.get("rpc_port", "0") != "0":
        flags["port"] = flags["rpc_port"]
    known = MasterFlags.keys()
    reading = read_fields(MasterFlags, {key: value for key, value in flags.items() if key in known}, origin=where, where=where)
    if reading.options.enable_multi_tenants and reading.options.tenant_quota_connector_uri is None:
        raise OptionError("tenant_quota_connector_uri", None, "is required with enable_multi_tenants", where=where)
    if "config_path" in flags or "flagfile" in flags:
        unread = f"{where}: flags in the file of --config_path or --flagfile are not read: give them in the command"
        return Reading(reading.options, [*reading.warnings, unread], reading.sources)
    return reading


def check_master(
    flags: MasterFlags,
    client: MooncakeOptions,
    path: str,
    env: Mapping[str, str],
    *,
    load_timeout_ms: int | None,
    where: str,
) -> list[str]:
    """Does the client of ``path`` fit the master whose command is ``where``? Warnings; OptionError for what cannot work."""
    address = client.master_server_address
    if not address.startswith("etcd://") and port_of(address) != flags.port:
        raise OptionError("master_server_address", address, f"but the master listens on port {flags.port}", where=path)
    if client.enable_ssd_offload and not flags.enable_offload:
        reason = (
            "but the master runs with --enable_offload=false, so nothing would reach the disk: start it with --enable_offload=true"
        )
        raise OptionError("enable_ssd_offload", True, reason, where=path)
    ttl, ascend = flags.default_kv_lease_ttl, client.protocol == "ascend"
    warnings = check_lease(ttl, env, load_timeout_ms, "default_kv_lease_ttl", where, ascend=ascend)
    if client.enable_ssd_offload and ascend and flags.client_ttl < MIN_CLIENT_TTL:
        warnings.append(
            f"client_ttl={flags.client_ttl} s: while an engine binds its threads to CPUs pings can be late, and the disk of the "
            f"rank is dropped (SEGMENT_NOT_FOUND); set {MIN_CLIENT_TTL} to 120"
        )
    return warnings + _check_tenant(flags, client, path)


def _check_tenant(flags: MasterFlags, client: MooncakeOptions, path: str) -> list[str]:
    tenant = client.tenant_id
    if not flags.enable_multi_tenants:
        if tenant == "default":
            return []
        return [f"tenant_id={tenant} keeps nothing apart: the master runs without --enable_multi_tenants=true"]
    uri = flags.tenant_quota_connector_uri
    if flags.tenant_quota_connector_type != "file" or uri is None:
        return []
    try:
        tenants = policy_tenants(read_text(uri, "tenant_quota_connector_uri"))
    except OptionError as error:
        return [f"{error}; tenants were not compared"]
    if not tenants:
        return [f"{uri}: no line with the name of a tenant was found; tenants were not compared"]
    if tenant not in tenants:
        registered = ", ".join(sorted(tenants)) or "none"
        reason = f"is not registered in {uri} (registered: {registered}): a strict master refuses its writes"
        raise OptionError("tenant_id", tenant, reason, where=path)
    return []
