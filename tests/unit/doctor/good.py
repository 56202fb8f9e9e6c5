"""Hosts on which nothing is wrong, and deployments that need them: cases change one thing at a time."""

from __future__ import annotations

from dataclasses import replace

from kvpool.ops.doctor.facts.container import Container
from kvpool.ops.doctor.facts.files import LOOKED_AT, Files
from kvpool.ops.doctor.facts.free_runs import FreeRuns
from kvpool.ops.doctor.facts.huge_pages import HugePages, NodePages
from kvpool.ops.doctor.facts.memory import Memory
from kvpool.ops.doctor.facts.npu_tools import NpuTools
from kvpool.ops.doctor.facts.ports import Ports
from kvpool.ops.doctor.facts.versions import Versions
from kvpool.ops.doctor.host import Ran
from kvpool.ops.doctor.need import Need
from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.memcache_conf import read_local_conf
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.options.yuanrong_worker import WorkerFlags

GIB = 1 << 30
IFNAMES = dict.fromkeys(("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
TOOLKIT = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann", "LD_LIBRARY_PATH": "/x/mooncake:/x/memcache_hybrid/lib"}
ROCE = TOOLKIT | IFNAMES | {"HCCL_IF_IP": "10.0.0.1", "HCCL_INTRA_ROCE_ENABLE": "1"}
HCCS = TOOLKIT | {"ACL_OP_INIT_MODE": "1", "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
UBOE = TOOLKIT | {"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.protocol_desc":["uboe:device"]}'}

VERSIONS = Versions(
    python="3.11.9",
    glibc="2.36",
    vllm="0.32.0",
    vllm_ascend="0.32.0rc1",
    mooncake=(("mooncake-transfer-engine-npu", "0.3.13"),),
    memcache="1.3.0",
    memfabric="1.2.0",
    yuanrong="0.8.1",
    cann="9.1.0",
    npu_driver="26.0.0",
    nvidia_driver="550.1",
)
FILES = Files(
    there=frozenset(LOOKED_AT),
    npus=(0, 1),
    gpus=(0,),
    npu_addresses=(0, 1),
    rdma=1,
    verbs=True,
    interfaces=("eth0", "lo"),
)
PORTS = Ports(interface_address=True)
CONTAINER = Container(inside=True, capabilities=(1 << 41) - 1, host_network=True, filtered=False)
MEMORY = Memory(
    total=512 * GIB,
    free=300 * GIB,
    available=400 * GIB,
    cached=50 * GIB,
    shm_total=256 * GIB,
    shm_free=200 * GIB,
    groups=True,
    locked=-1,
)
PAGES = HugePages(total=200_000, free=200_000, nodes=(NodePages(0, 100_000, 100_000), NodePages(1, 100_000, 100_000)))
RUNS = FreeRuns(small=150_000, large=290, longest=200 * GIB)
TOOLS = NpuTools(
    smi=Ran(0, ""),
    topology=Ran(0, ""),
    hccn=True,
    links=((0, "UP"), (1, "UP")),
    addresses=((0, "10.1.0.1"), (1, "10.1.0.2")),
)

OPTIONS = AscendStoreOptions.model_validate({"local_dram_size": "8GB"})
MOONCAKE = MooncakeOptions.model_validate({"master_server_address": "10.0.0.9:50088", "global_segment_size": "20GB"})
L = "ock.mmc.local_service"


def memcache(**keys: str):
    """mmc-local.conf with further keys of the local service."""
    lines = ["ock.mmc.meta_service_url = tcp://10.0.0.9:5000", f"{L}.config_store_url = tcp://10.0.0.9:6000"]
    lines += [f"{L}.{key.replace('_', '.')} = {value}" for key, value in keys.items()]
    return read_local_conf("\n".join(lines), "mmc-local.conf").options


LOCAL = Need(env={"VLLM_CPU_KVCACHE_SPACE": "4"}, options=OPTIONS)
CUDA = Need(series="cuda", options=OPTIONS)
A2 = Need(series="a2", backend="mooncake", link="roce", env=ROCE, options=OPTIONS, conf=MOONCAKE)
A3 = Need(series="a3", backend="mooncake", env=HCCS, options=OPTIONS, conf=MOONCAKE, lingqu="1.5")
A5 = Need(series="a5", backend="mooncake", env=UBOE, options=OPTIONS, conf=MOONCAKE)
SDMA, UBOE_CONF = memcache(protocol="device_sdma", dram_size="10GB"), memcache(protocol="device_uboe", dram_size="10GB")
A3_MEMCACHE = Need(series="a3", backend="memcache", env=HCCS, options=OPTIONS, conf=SDMA, lingqu="1.5")
A3_LAYERWISE = replace(A3_MEMCACHE, role="prefill", layerwise=True)
A3_REMOTE_D2H = Need(role="decode", series="a3", remote_d2h=True, env=HCCS, lingqu="1.5")
A5_MEMCACHE = Need(series="a5", backend="memcache", env=UBOE, options=OPTIONS, conf=UBOE_CONF)
A3_YUANRONG = Need(
    series="a3",
    backend="yuanrong",
    env=HCCS,
    options=OPTIONS,
    conf=YuanrongOptions.model_validate({"worker_addr": "10.0.0.1:31501"}),
    workers=(WorkerFlags.model_validate({"shared_memory_size_mb": 40960, "enable_huge_tlb": True}),),
    lingqu="1.5",
)
CPU_MOONCAKE = replace(
    LOCAL, backend="mooncake", conf=MooncakeOptions.model_validate({"master_server_address": "10.0.0.9:1", "protocol": "rdma"})
)
EVERY = (LOCAL, CUDA, A2, A3, A5, A3_MEMCACHE, A3_LAYERWISE, A3_REMOTE_D2H, A5_MEMCACHE, A3_YUANRONG, CPU_MOONCAKE)
