"""How mmc-local.conf and mmc-meta.conf depend on each other, the hardware and the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpool.options.addresses import check_reachable, host_of, is_wildcard, port_of
from kvpool.options.amounts import GIB, huge_pages, whole_gib
from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError
from kvpool.options.hardware_env import hardware_warnings
from kvpool.options.memcache_conf import LOCAL, LocalConf, MetaConf
from kvpool.options.ubsio import check_ubsio

EXTEND_LIB = "MEMFABRIC_HYBRID_EXTEND_LIB_PATH"
PROXY_PORT = 8000
DEFAULT_METRICS = "http://127.0.0.1:8000"  # of the library
MAX_DRAM = 1 << 40
SERIES: dict[str, tuple[str, ...]] = {
    "device_rdma": ("A2", "A3"),
    "device_sdma": ("A3",),
    "device_urma": ("A5",),
    "device_uboe": ("A5",),
}
"""The series of NPUs on which a protocol works."""


def check_local(conf: LocalConf, path: str, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """One mmc-local.conf against hardware and host: warnings; OptionError for what cannot start."""
    for name in ("meta_service_url", "config_store_url"):
        check_reachable(_key(name), getattr(conf, name), deployment, path)
    warnings = _check_protocol(conf, path, deployment) + _check_sizes(conf, path, deployment)
    if conf.protocol.startswith("device_"):
        warnings += _check_libraries(env, deployment) + hardware_warnings(env, deployment)
    if conf.storage_enabled:
        warnings += check_ubsio(conf, path, deployment)
    return warnings


def _key(name: str) -> str:
    return LocalConf.model_fields[name].alias or name


def _check_protocol(conf: LocalConf, path: str, deployment: Deployment) -> list[str]:
    protocol, device = conf.protocol, deployment.device

    def refuse(reason: str) -> OptionError:
        return OptionError(f"{LOCAL}.protocol", protocol, reason, where=path)

    if protocol == "host_shm" and (deployment.hosts or 1) > 1:
        raise refuse(f"works within one host only, but {deployment.hosts} hosts share the pool")
    if protocol.startswith("device_"):
        if device in ("cpu", "cuda"):
            raise refuse(f"needs an NPU, but the KV lies on {device}: set host_shm (one host), host_tcp or host_rdma")
        if deployment.hardware and deployment.hardware not in SERIES[protocol]:
            fitting = ", ".join(name for name, series in SERIES.items() if deployment.hardware in series)
            raise refuse(f"is for the series {' and '.join(SERIES[protocol])}, not {deployment.hardware}: set {fitting}")
        return []
    if device is not None and protocol == "host_rdma" and not deployment.host.rdma_devices():
        return [f"{LOCAL}.protocol=host_rdma: this host shows no RDMA device; host_tcp and host_shm need none"]
    if device is not None and protocol == "host_tcp" and conf.dram_size and deployment.host.huge_pages() == 0:
        pages = huge_pages(conf.dram_size)
        return [f"{LOCAL}.protocol=host_tcp takes dram.size from huge pages, and none are reserved: reserve {pages} of 2 MiB"]
    return []


def _check_sizes(conf: LocalConf, path: str, deployment: Deployment) -> list[str]:
    ranks = max(deployment.ranks, deployment.ranks_here)
    if ranks > conf.world_size:
        raise OptionError(f"{LOCAL}.world_size", conf.world_size, f"is less than the {ranks} ranks of this engine", where=path)
    warnings = []
    if conf.dram_size == 0 and conf.max_dram_size is None:
        warnings.append(f"{LOCAL}.max.dram.size is not set: processes with other sizes of memory than this one (0GB) cannot join")
    warnings += _check_whole(conf, path, deployment)
    free = deployment.host.memory_available() if deployment.local_ranks is not None else None
    total = (conf.dram_size or 0) * deployment.ranks_here
    if free is not None and total > free:
        warnings.append(
            f"{LOCAL}.dram.size: {deployment.ranks_here} ranks take {total / GIB:.1f} GB, {free / GIB:.1f} GB of memory are free"
        )
    return warnings


def _check_whole(conf: LocalConf, path: str, deployment: Deployment) -> list[str]:
    """Memory for NPUs is mapped by whole GB: on A3 anything else fails, elsewhere the library rounds up."""
    if (conf.dram_size or 0) > MAX_DRAM:
        raise OptionError(f"{LOCAL}.dram.size", conf.dram_size, "is more than 1TB, the most that one process can give", where=path)
    if not conf.dram_size or conf.dram_size % GIB == 0:
        return []
    reason = f"is not a multiple of 1GB, in which NPUs map it: set {whole_gib(conf.dram_size)}GB"
    if deployment.hardware == "A3":
        raise OptionError(f"{LOCAL}.dram.size", conf.dram_size, reason, where=path)
    return [f"{LOCAL}.dram.size={conf.dram_size} {reason}"] if conf.protocol.startswith("device_") else []


def _check_libraries(env: Mapping[str, str], deployment: Deployment) -> list[str]:
    folder = env.get(EXTEND_LIB)
    if not folder:
        package = deployment.host.package_folder("memfabric_hybrid")
        place = (
            f"the folder lib in {package}"
            if package
            else "the folder lib64 of MemFabric (the package memfabric_hybrid is not here)"
        )
        return [f"{EXTEND_LIB} is not set: device protocols load their libraries from there; it should be {place}"]
    if not deployment.host.is_folder(folder):
        return [f"{EXTEND_LIB}={folder} is no folder: device protocols load their libraries from there"]
    return []


def check_meta(meta: MetaConf, path: str, proxy_port: int | None) -> list[str]:
    """mmc-meta.conf alone: OptionError where two of its listeners, or one and the proxy, want the same port."""
    seen: list[tuple[str, str]] = []
    for name in ("meta_service_url", "config_store_url", "metrics_url"):
        url, alias = getattr(meta, name) or DEFAULT_METRICS, MetaConf.model_fields[name].alias or name
        for other, other_alias in seen:
            if port_of(other) == port_of(url) and (host_of(other) == host_of(url) or is_wildcard(other) or is_wildcard(url)):
                raise OptionError(alias, url, f"has the port of {other_alias}", where=path)
        if port_of(url) == proxy_port:
            raise OptionError(alias, url, f"has the port of the proxy ({proxy_port}): set another", where=path)
        seen.append((url, alias))
    metrics_url = meta.metrics_url or DEFAULT_METRICS
    if proxy_port is None and port_of(metrics_url) == PROXY_PORT:
        return [
            f"ock.mmc.meta_service.metrics_url={metrics_url} has the port that the proxies take by default ({PROXY_PORT}): "
            "on one host the second of them does not start"
        ]
    return []


def check_locals(files: Sequence[tuple[str, LocalConf]]) -> None:
    """Several mmc-local.conf of one pool: OptionError where what must be equal is not, or one gives more than another allows."""
    for path, conf in files:
        for other_path, other in files:
            for name in ("meta_service_url", "config_store_url", "protocol", "world_size"):
                mine, theirs = getattr(conf, name), getattr(other, name)
                if mine != theirs:
                    raise OptionError(_key(name), mine, f"differs from {theirs} of {other_path}", where=path)
            _check_largest(conf, path, other, other_path)


def _check_largest(conf: LocalConf, path: str, other: LocalConf, other_path: str) -> None:
    """Where processes give different sizes, max.dram.size of all of them must be the largest."""
    theirs, limit = other.dram_size, conf.max_dram_size
    if theirs is None or conf.dram_size is None:
        return
    if limit is None and theirs > conf.dram_size:
        reason = f"is required, at least {theirs}, since dram.size differs from that of {other_path}"
        raise OptionError(f"{LOCAL}.max.dram.size", None, reason, where=path)
    if limit is not None and theirs > limit:
        raise OptionError(f"{LOCAL}.max.dram.size", limit, f"is less than dram.size={theirs} of {other_path}", where=path)


def check_pair(local: LocalConf, meta: MetaConf, path: str) -> None:
    """OptionError where a local service would not find the meta service that ``meta`` starts."""
    for name in ("meta_service_url", "config_store_url"):
        mine, theirs = getattr(local, name), getattr(meta, name)
        if mine != theirs:
            raise OptionError(_key(name), mine, f"differs from {theirs} of the meta service", where=path)
