"""What the chosen deployment needs of this host: the answers of the configuration, and amounts that follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpool.ops.doctor.raw import Disks
from kvpool.options.addresses import is_unspecified, only_here
from kvpool.options.amounts import GIB, huge_pages
from kvpool.options.ascend_store import AscendStoreOptions, BackendName
from kvpool.options.deployment import Hardware
from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_master import MasterFlags
from kvpool.options.mooncake_rules import host_nbytes
from kvpool.options.prefill_decode import PullOptions
from kvpool.options.probe import Device
from kvpool.options.pull_rules import Place, choose_engine, find_place
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.options.yuanrong_worker import WorkerFlags

Role = Literal["prefill", "decode", "mixed"]
Series = Literal["cpu", "cuda", "a2", "a3", "a5"]
Link = Literal["roce", "hccs", "uboe", "ub"]
HARDWARE: dict[Series, Hardware] = {"a2": "A2", "a3": "A3", "a5": "A5"}
GUIDE_PAGES = 200_000
"""Huge pages of 2 MiB that the deployment guide reserves for NPUs over RoCE, where the pool's size is not known."""


class Endpoint(NamedTuple):
    """``what`` listens at ``address`` ("host:port")."""

    what: str
    address: str


class Amount(NamedTuple):
    """``nbytes`` that ``what`` takes."""

    what: str
    nbytes: int


class Pages(NamedTuple):
    """Huge pages of 2 MiB; ``must``: without them it does not start."""

    what: str
    number: int
    must: bool


@dataclass(frozen=True, slots=True)
class Need:
    """One deployment on this host. ``conf`` is what the store's own file says; None where there is none or it is refused.
    ``layerwise`` and ``remote_d2h`` are what the configuration switches on, also where this version refuses it.

    ``services`` must answer, ``ports`` must be free here; ``ranks`` are those of this host. ``leases`` are configured ones, in
    ms, by name. ``lingqu`` is the version of the LingQu Computing Network, which no file of a host shows."""

    role: Role = "mixed"
    series: Series = "cpu"
    backend: BackendName = "local"
    link: Link | None = None
    ranks: int = 1
    hosts: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: AscendStoreOptions | None = None
    pull: PullOptions | None = None
    layerwise: bool = False
    remote_d2h: bool = False
    conf: OptionModel | None = None
    conf_path: str = ""
    conf_variable: str = ""
    leases: tuple[tuple[str, int], ...] = ()
    masters: tuple[MasterFlags, ...] = ()
    workers: tuple[WorkerFlags, ...] = ()
    disks: Disks = field(default_factory=Disks)
    hash_algo: str | None = None
    lingqu: str | None = None
    services: tuple[Endpoint, ...] = ()
    ports: tuple[Endpoint, ...] = ()
    peers: tuple[str, ...] = ()
    npu_peers: tuple[str, ...] = ()
    measure: bool = False

    @property
    def npu(self) -> bool:
        return self.series in HARDWARE

    @property
    def device(self) -> Device:
        return "npu" if self.npu else "cuda" if self.series == "cuda" else "cpu"

    @property
    def protocol(self) -> str:
        """The store's transport, "" where it has none or its file is not known."""
        return self.conf.protocol if isinstance(self.conf, MooncakeOptions | LocalConf) else ""

    @property
    def mooncake(self) -> bool:
        """True where Mooncake's library moves bytes: as the store, or from prefill to decode."""
        return self.backend == "mooncake" or self.pull is not None

    @property
    def prefill_place(self) -> Place | None:
        """Where prefill on this host listens for decode; None where none does, or nobody could be reached there."""
        if self.pull is None or self.role == "decode":
            return None
        place = find_place(self.pull, self.env)
        return None if is_unspecified(place.host) else place

    @property
    def memfabric(self) -> bool:
        """True where MemFabric moves bytes."""
        return self.backend == "memcache" or self.remote_d2h

    @property
    def of_layerwise_guide(self) -> bool:
        """True for what the layer-wise guide installs: layer-wise prefill on MemCache, and both sides of remote D2H."""
        return self.remote_d2h or (self.layerwise and self.backend == "memcache")

    @property
    def contiguous(self) -> bool:
        """True where the pool's memory is mapped for NPUs, by pages of 2 MiB and 1 GiB."""
        return self.npu and self.backend in ("mooncake", "memcache")

    @property
    def roce(self) -> bool:
        return self.series == "a2" or (self.series == "a3" and self.link == "roce")

    @property
    def several_hosts(self) -> bool:
        """True where a service of the pool is elsewhere, or the operator says so."""
        return (self.hosts or 1) > 1 or any(not only_here(endpoint.address) for endpoint in self.services)


def memory_amounts(need: Need) -> list[Amount]:
    """Memory that is taken on this host beside huge pages, as far as the configuration tells."""
    found: list[Amount] = []
    conf = need.conf
    if need.backend == "local" and need.options is not None:
        found.append(Amount("local_dram_size", need.options.local_dram_size))
    if isinstance(conf, MooncakeOptions):
        found.append(Amount(f"{need.ranks} x (segment and buffers of Mooncake)", host_nbytes(conf, need.env, need.ranks)))
    if isinstance(conf, LocalConf):
        if conf.protocol != "host_tcp":
            found.append(Amount(f"{need.ranks} x dram.size", (conf.dram_size or 0) * need.ranks))
        if conf.storage_enabled:
            found.append(Amount("ubsio.mem.size_in_gb of all services", conf.ubsio_memory_gb * GIB * (conf.device_count or 1)))
    found += [
        Amount("shared_memory_size_mb", worker.shared_memory_size_mb << 20) for worker in need.workers if not worker.enable_huge_tlb
    ]
    if need.series == "cpu" and (space := need.env.get("VLLM_CPU_KVCACHE_SPACE", "")).isdigit():
        found.append(Amount(f"{need.ranks} x VLLM_CPU_KVCACHE_SPACE", int(space) * GIB * need.ranks))
    return [amount for amount in found + _transfer_buffer(need) if amount.nbytes]


def shared_memory_amounts(need: Need) -> list[Amount]:
    """What of it lies in /dev/shm."""
    found: list[Amount] = []
    if need.backend == "local" and need.options is not None and need.options.local_pool_root is None:
        found.append(Amount("local_dram_size", need.options.local_dram_size))
    if isinstance(need.conf, LocalConf) and need.conf.protocol == "host_shm":
        found.append(Amount(f"{need.ranks} x dram.size", (need.conf.dram_size or 0) * need.ranks))
    if need.pull is not None and need.pull.transfer_root is None:
        found += _transfer_buffer(need)
    return [amount for amount in found if amount.nbytes]


def _transfer_buffer(need: Need) -> list[Amount]:
    """MooncakeConnectorV1 within one host: prefill lays KV on its way into shared memory."""
    pull = need.pull
    if pull is None or need.role == "decode":
        return []
    if choose_engine(pull, find_place(pull, need.env)).engine == "local_host":
        return [Amount("transfer_buffer_size", pull.transfer_buffer_size)]
    return []


def page_needs(need: Need) -> list[Pages]:
    """Huge pages of 2 MiB that are taken on this host."""
    found = [
        Pages("enable_huge_tlb of the Yuanrong worker", huge_pages(worker.shared_memory_size_mb << 20), True)
        for worker in need.workers
        if worker.enable_huge_tlb
    ]
    conf = need.conf
    if isinstance(conf, YuanrongOptions) and conf.enable_remote_h2d and not found:
        found.append(Pages("enable_remote_h2d of Yuanrong", 1, True))
    if isinstance(conf, LocalConf) and conf.protocol == "host_tcp" and conf.dram_size:
        found.append(Pages("dram.size with host_tcp", huge_pages(conf.dram_size * need.ranks), True))
    if need.roce and need.backend in ("mooncake", "memcache"):
        pool = sum(amount.nbytes for amount in memory_amounts(need))
        found.append(Pages("NPUs over RoCE", huge_pages(pool) if pool else GUIDE_PAGES, False))
    return found


def page_nbytes() -> int:
    """The size of an ordinary page of this host."""
    return os.sysconf("SC_PAGE_SIZE")
