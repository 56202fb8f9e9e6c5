"""What a series of hardware needs around an engine: variables, protocols, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool.options.ascend_store import BACKENDS, BackendName
from kvpool.options.errors import OptionError
from kvpool.options.probe import Device
from kvpool.options.reach import unreached

SeriesName = Literal["a2", "a3", "a5", "cuda", "cpu"]
LINKS: dict[str, tuple[str, ...]] = {"a2": ("roce",), "a3": ("hccs", "roce"), "a5": ("ub", "uboe"), "cuda": (), "cpu": ()}
"""How devices reach each other, by series; the first one is the default."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Series:
    """``link`` is "" where there is no choice. Checked."""

    name: SeriesName
    link: str

    @property
    def npu(self) -> bool:
        return self.name in ("a2", "a3", "a5")

    @property
    def device(self) -> Device:
        return "npu" if self.npu else "cuda" if self.name == "cuda" else "cpu"

    @property
    def mooncake_protocol(self) -> str:
        return "ascend" if self.npu else "tcp"

    @property
    def memcache_protocol(self) -> str:
        """Host protocols on CPUs: shared memory, since host_tcp and host_rdma need huge pages or hcom."""
        by_link = {"hccs": "device_sdma", "roce": "device_rdma", "ub": "device_urma", "uboe": "device_uboe"}
        return by_link.get(self.link, "host_shm")

    @property
    def wants_huge_pages(self) -> bool:
        """Where host memory is registered with the network card."""
        return self.link == "roce"

    @property
    def visible(self) -> str:
        """The variable that says which devices an engine takes."""
        return {"cuda": "CUDA_VISIBLE_DEVICES", "cpu": ""}.get(self.name, "ASCEND_RT_VISIBLE_DEVICES")

    def variables(self, host: str, nic: str) -> dict[str, str]:
        """For an engine on ``host``, whose address is on the interface ``nic``. One of the two of A5, never both."""
        if self.link == "roce":
            names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
            return {"HCCL_IF_IP": host, **dict.fromkeys(names, nic), "HCCL_INTRA_ROCE_ENABLE": "1"}
        if self.link == "hccs":
            return {"ACL_OP_INIT_MODE": "1", "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
        if self.link == "uboe":
            return {"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.protocol_desc":["uboe:device"]}'}
        if self.link == "ub":
            return {"ASCEND_LOCAL_COMM_RES": '{"version":"1.3"}'}
        space = {"VLLM_CPU_KVCACHE_SPACE": "8"} if self.name == "cpu" else {}  # GiB; unset, vLLM takes nearly all memory
        return {"GLOO_SOCKET_IFNAME": nic, **space}


def series_of(name: str, link: str | None) -> Series:
    """OptionError for a name or a link that is none of this series."""
    if name not in LINKS:
        raise OptionError("--series", name, f"accepted: {', '.join(LINKS)}")
    accepted = LINKS[name]
    if link is not None and link not in accepted:
        raise OptionError("--link", link, f"accepted with --series {name}: {', '.join(accepted) or 'none'}")
    return Series(name, link or next(iter(accepted), ""))  # type: ignore[arg-type]


def series_backend(given: str | None, series: Series, separated: bool) -> BackendName:
    """The store: the one that was given, if it works there, else the usual one."""
    accepted = tuple(name for name in BACKENDS if _unfit(name, series, separated) == "")
    if given is not None and given not in BACKENDS:
        raise OptionError("--backend", given, f"accepted: {', '.join(accepted)}")
    if given is not None and given not in accepted:
        raise OptionError("--backend", given, f"{_unfit(given, series, separated)}; accepted: {', '.join(accepted)}")
    usual: BackendName = "local" if "local" in accepted else "mooncake" if "mooncake" in accepted else "memcache"
    return given or usual


def _unfit(backend: BackendName, series: Series, separated: bool) -> str:
    """Why this store does not work there; "" where it does."""
    if reason := unreached(backend, series.device):
        return reason
    if backend == "local" and separated:
        return "has no process that owns the memory"
    if backend == "mooncake" and separated and series.npu:
        return "has no owner that maps memory for NPUs"
    return ""
