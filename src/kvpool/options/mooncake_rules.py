"""How mooncake.json depends on the device, the environment and the host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.options.addresses import check_reachable
from kvpool.options.amounts import GIB, fabric_nbytes, mooncake_host_nbytes, whole_gib
from kvpool.options.deployment import Deployment
from kvpool.options.environment import RESOURCE_CONFIG, resource_config
from kvpool.options.errors import OptionError
from kvpool.options.hardware_env import hardware_warnings
from kvpool.options.mooncake_ssd import BUFFER, buffer_nbytes

if TYPE_CHECKING:
    from kvpool.options.mooncake_json import MooncakeOptions

FABRIC_MEMORY = "ASCEND_ENABLE_USE_FABRIC_MEM"
LISTENS = (
    "mooncake: its transfer engine listens on all interfaces of this host, on two free ports, and asks nobody for a password: "
    "the pool belongs into a private network"
)


def check_mooncake(options: MooncakeOptions, path: str, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """Warnings; OptionError for what cannot start."""
    check_protocol("protocol", options.protocol, deployment, path)
    check_reachable("master_server_address", options.master_server_address, deployment, path)
    if options.protocol != "ascend":
        warnings = _check_others(options, env, deployment)
        return warnings + _check_memory(options, env, deployment)
    warnings = _check_fabric(options, env, deployment) + hardware_warnings(env, deployment)
    if options.device_name:
        warnings.append(f"device_name={options.device_name} has no effect with protocol ascend: leave it empty")
    return warnings + _check_memory(options, env, deployment)


def _check_others(options: MooncakeOptions, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """What there is to say of tcp and rdma."""
    warnings = []
    if env.get(FABRIC_MEMORY) == "1":
        warnings.append(f"{FABRIC_MEMORY}=1 has no effect with protocol {options.protocol}")
    return warnings + rdma_warnings("protocol", options.protocol, deployment)


def rdma_warnings(key: str, protocol: str, deployment: Deployment) -> list[str]:
    """A line where the host of an engine shows no RDMA device, but ``key`` asks for one."""
    if protocol == "rdma" and deployment.device is not None and not deployment.host.rdma_devices():
        return [f"{key}=rdma: this host shows no RDMA device; tcp works everywhere"]
    return []


def check_protocol(key: str, protocol: str, deployment: Deployment, where: str) -> None:
    """OptionError where the protocol of Mooncake that ``key`` sets does not reach the memory of the device."""
    device = deployment.device
    if device in ("cpu", "cuda") and protocol == "ascend":
        raise OptionError(key, protocol, f'needs an NPU, but the KV lies on {device}: set "tcp" or "rdma"', where=where)
    if device == "npu" and protocol != "ascend":
        raise OptionError(key, protocol, 'cannot reach the memory of an NPU: set "ascend"', where=where)


def _check_fabric(options: MooncakeOptions, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    value = env.get(FABRIC_MEMORY, "")
    if value not in ("", "0", "1"):
        return [f"{FABRIC_MEMORY}={value} has no effect: only 1 switches fabric memory on"]
    if value != "1":
        return []
    if deployment.hardware not in (None, "A3"):
        return [f"{FABRIC_MEMORY}=1 is for the A3 series, not {deployment.hardware}"]
    quota = _quota(env)
    nbytes, names = options.global_segment_size, "global_segment_size"
    if options.enable_ssd_offload:
        nbytes, names = fabric_nbytes(nbytes, buffer_nbytes(env)), f"global_segment_size and {BUFFER} together"
    if not isinstance(quota, int) or quota * GIB >= nbytes:
        return []
    need = whole_gib(nbytes)
    return [f"fabric_memory.max_capacity={quota} GB of {RESOURCE_CONFIG} is less than {names}: set at least {need}, and some more"]


def _quota(env: Mapping[str, str]) -> object:
    """The quota of fabric memory in GB as it is written; broken JSON is warned of where the variable is merged."""
    with suppress(OptionError):
        return resource_config(env).get("fabric_memory.max_capacity")
    return None


def host_nbytes(options: MooncakeOptions, env: Mapping[str, str], ranks: int) -> int:
    """Memory of one host that ``ranks`` take: segments and buffers."""
    offload = buffer_nbytes(env) if options.enable_ssd_offload else 0
    return mooncake_host_nbytes(ranks, options.global_segment_size, offload, options.local_buffer_size)


def _check_memory(options: MooncakeOptions, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """A warning where all ranks of this host would take more memory than is free."""
    free = deployment.host.memory_available() if deployment.local_ranks is not None else None
    total = host_nbytes(options, env, deployment.ranks_here)
    if free is None or total <= free:
        return []
    return [
        f"{deployment.ranks_here} ranks take {total / GIB:.1f} GB for the pool (segment, buffers), but {free / GIB:.1f} GB of "
        "memory are free: lower global_segment_size or local_buffer_size"
    ]
