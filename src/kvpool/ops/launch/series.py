"""What a series of hardware needs around an engine: variables, protocols, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool.options.ascend_store import BACKENDS, BackendName
from kvpool.options.errors import OptionError

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
    def mooncake_protocol(self) -> str:
        return "ascend" if self.npu else "tcp"

    @property
    def memcache_protocol(self) -> str:
        """Host protocols elsewhere: shared memory, since host_tcp and host_rdma need huge pages or hcom."""
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
    if given is not None and given not in BACKENDS:
        raise OptionError("--backend", given, f"accepted: {', '.join(BACKENDS)}")
    if given == "local" and series.name != "cpu":
        raise OptionError("--backend", given, f"does not reach the memory of {series.name}; accepted: {', '.join(BACKENDS[1:])}")
    if given == "local" and separated:
        raise OptionError("--backend", given, f"has no process that owns the memory; accepted: {', '.join(BACKENDS[1:])}")
    usual: BackendName = "local" if series.name == "cpu" and not separated else "mooncake"
    return given or usual
