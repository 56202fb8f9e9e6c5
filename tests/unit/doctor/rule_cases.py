"""For every check of the catalogue: facts or a need that make it speak, the level, and what its fix must say."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.doctor import good
from tests.unit.doctor.case import FAILURE, UNKNOWN, WARNING, Case, case, env
from tests.unit.doctor.good import GIB
from tests.unit.doctor.version_cases import SIDES, of_versions

from kvpool.ops.doctor.facts.ports import Tried
from kvpool.ops.doctor.facts.ssd import Directory, Ssd
from kvpool.ops.doctor.host import Ran
from kvpool.ops.doctor.measuring import Measured
from kvpool.ops.doctor.need import Endpoint
from kvpool.ops.doctor.raw import Disks
from kvpool.ops.doctor.rules import (
    configuration,
    container,
    environment,
    files,
    huge_pages,
    lease,
    measure,
    memory,
    npu_tools,
    ports,
    ssd,
)
from kvpool.options.block_device import Disk
from kvpool.options.prefill_decode import PullOptions


def tried(endpoint: Endpoint, outcome: bool | None, text: str, here: bool = False) -> tuple[Tried, ...]:
    return (Tried(endpoint, outcome, text, here),)


def of_environment() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, environment.judge_environment, (good.FILES, good.PORTS, need), **changes)

    def without(check, level, found, fix, need, name, **more):
        return of(check, level, found, fix, need, env=env(need, name, **more))

    e = environment
    named = replace(
        good.A2, conf_variable="MOONCAKE_CONFIG_PATH", conf_path="/m.json", env=env(good.A2, MOONCAKE_CONFIG_PATH="/m.json")
    )
    seen = replace(good.A2, env=env(good.A2, ASCEND_RT_VISIBLE_DEVICES="0,1"))
    ub = env(good.A5, "ASCEND_GLOBAL_RESOURCE_CONFIG", ASCEND_LOCAL_COMM_RES='{"version":"1.3"}')
    resources, slip = "ASCEND_GLOBAL_RESOURCE_CONFIG", '{"comm_resource_config.listen_prt": 1}'
    return [
        of(e.SEED, FAILURE, "with xxhash", "export PYTHONHASHSEED=0", good.LOCAL, hash_algo="xxhash"),
        without(e.CONFIG, FAILURE, "is unset", "export MOONCAKE_CONFIG_PATH=/m.json", named, "MOONCAKE_CONFIG_PATH"),
        without(e.CONFIG, FAILURE, "=/other", "export MOONCAKE_CONFIG_PATH=/m.json", named, "", MOONCAKE_CONFIG_PATH="/other"),
        without(e.ROCE, FAILURE, "is not 1", "export HCCL_INTRA_ROCE_ENABLE=1", good.A2, "HCCL_INTRA_ROCE_ENABLE"),
        without(e.ROCE, FAILURE, "is not 1", "=1", replace(good.A3, link="roce", env=good.ROCE), "HCCL_INTRA_ROCE_ENABLE"),
        without(e.INTERFACES, FAILURE, "is unset", "HCCL_SOCKET_IFNAME=<one of eth0>", good.A2, "HCCL_SOCKET_IFNAME"),
        without(e.INTERFACES, FAILURE, "=bond0", "one of these", good.A2, "", GLOO_SOCKET_IFNAME="bond0"),
        without(e.INTERFACES, FAILURE, "==eth", "one of these", good.A2, "", TP_SOCKET_IFNAME="=eth"),
        without(e.INTERFACES, FAILURE, "GLOO_SOCKET_IFNAME=eth", "one of these", good.A2, "", GLOO_SOCKET_IFNAME="eth"),
        without(e.INTERFACES, FAILURE, "=^eth", "one of these", good.A2, "", HCCL_SOCKET_IFNAME="^eth"),
        of(e.INTERFACES, UNKNOWN, "=eth0", "ip -br link", good.A2, interfaces=None),
        without(e.ADDRESS, FAILURE, "is unset", "export HCCL_IF_IP=", good.A2, "HCCL_IF_IP"),
        of(e.ADDRESS, FAILURE, "is not of this host", "ip -br address", good.A2, interface_address=False),
        of(e.ADDRESS, UNKNOWN, "10.0.0.1", "ip -br address", good.A2, interface_address=None),
        without(e.HCCS, WARNING, "ACL_OP_INIT_MODE", "export ACL_OP_INIT_MODE=1", good.A3, "ACL_OP_INIT_MODE"),
        without(e.HCCS, WARNING, "FABRIC_MEM", "ASCEND_ENABLE_USE_FABRIC_MEM=1", good.A3, "ASCEND_ENABLE_USE_FABRIC_MEM"),
        without(e.HCCS, WARNING, "FABRIC_MEM", "export ASCEND_ENABLE", good.A3_MEMCACHE, "ASCEND_ENABLE_USE_FABRIC_MEM"),
        without(e.A5_LINK, FAILURE, "neither", "UBOE: export ASCEND_GLOBAL_RESOURCE_CONFIG=", good.A5, resources),
        of(e.A5_LINK, FAILURE, "alone", "export ASCEND_LOCAL_COMM_RES=", good.A5, link="ub"),
        of(e.A5_LINK, FAILURE, "alone", f"export {resources}=", replace(good.A5, link="uboe"), env=ub),
        without(e.A5_LINK, FAILURE, "no JSON", "export ASCEND_LOCAL_COMM_RES=", good.A5, "", ASCEND_LOCAL_COMM_RES="{1.3"),
        without(e.RESOURCES, FAILURE, "is not a JSON object", "correct", good.A2, "", **{resources: "{"}),
        without(e.RESOURCES, WARNING, "did you mean", "field", good.A2, "", **{resources: slip}),
        without(e.TOOLKIT, FAILURE, "are unset", "set_env.sh", good.A2, "ASCEND_HOME_PATH"),
        without(e.DEVICES, FAILURE, "no NPU 7", "from 0 on", seen, "", ASCEND_RT_VISIBLE_DEVICES="0,7"),
        of(e.DEVICES, UNKNOWN, "0,1", "npu-smi info", seen, dev=False),
        without(e.LIBRARIES, WARNING, "no such folder", "/mooncake:", good.A2, "LD_LIBRARY_PATH"),
        without(e.CPU_SPACE, WARNING, "is unset", "export VLLM_CPU_KVCACHE_SPACE", good.LOCAL, "VLLM_CPU_KVCACHE_SPACE"),
    ]


def of_files() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, files.judge_files, (good.FILES, need), **changes)

    def missing(check, need, *paths):
        there = good.FILES.there - set(paths)
        return of(check, FAILURE, f"{paths[0]}", paths[0], need, there=there)

    f = files
    hccn, route, rootinfo = "/etc/hccn.conf", "/lib/route.conf", "/etc/hccl_rootinfo.json"
    return [
        missing(f.NPU_NODES, good.A2, "/dev/devmm_svm"),
        missing(f.NPU_NODES, good.A5, "/dev/ummu", "/dev/uburma"),
        of(f.NPU_NODES, FAILURE, "/dev/davinci0", "--device=/dev/davinci0", good.A3, npus=()),
        of(f.NPU_NODES, UNKNOWN, "cannot be listed", "ls /dev", good.A3, dev=False),
        missing(f.HCCN, good.A2, hccn),
        of(f.HCCN, FAILURE, "is empty", "hccn_tool", good.A2, empty=frozenset([hccn])),
        of(f.HCCN, FAILURE, "no address for NPU 1", "hccn_tool", good.A2, npu_addresses=(0,)),
        missing(f.DRIVER, good.A3, "/usr/local/Ascend/driver"),
        missing(f.ROOTINFO, good.A5, rootinfo),
        of(f.ROOTINFO, FAILURE, "is not JSON", "from the host", good.A5, rootinfo=False),
        missing(f.ROUTE, good.A5, route),
        of(f.ROUTE, FAILURE, "is empty", "update it inside", good.A5, empty=frozenset([route])),
        missing(f.URMA, good.A5, "/usr/bin/urma_admin"),
        missing(f.INSTALL_INFO, good.A3_YUANRONG, "/etc/ascend_install.info"),
        of(f.GPU_NODES, FAILURE, "/dev/nvidia0", "--gpus all", good.CUDA, gpus=()),
        of(f.GPU_NODES, UNKNOWN, "cannot be listed", "nvidia-smi", good.CUDA, dev=False),
        of(f.RDMA, FAILURE, "no RDMA device", "TCP", good.CPU_MOONCAKE, rdma=0),
        of(f.RDMA, FAILURE, "uverbs", "--device=/dev/infiniband", good.CPU_MOONCAKE, verbs=False),
    ]


def of_container() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, container.judge_container, (good.CONTAINER, need), **changes)

    c, pull = container, PullOptions.model_validate({**SIDES, "transfer_engine": "process_vm"})
    reading = replace(good.LOCAL, pull=pull)
    return [
        of(c.NETWORK, WARNING, "no network device", "--net=host", good.A2, host_network=False),
        of(c.NETWORK, UNKNOWN, "cannot be listed", "--net=host", good.A2, host_network=None),
        of(c.NETWORK, UNKNOWN, "whether this is a container", "--net=host", good.A2, inside=None),
        of(c.PRIVILEGED, WARNING, "not privileged", "--privileged", good.A2, capabilities=0),
        of(c.PRIVILEGED, UNKNOWN, "not shown", "--privileged", good.A2, capabilities=None),
        of(c.LOCK, WARNING, "no IPC_LOCK", "--cap-add=IPC_LOCK", good.CPU_MOONCAKE, capabilities=0),
        of(c.LOCK, UNKNOWN, "not shown", "--cap-add=IPC_LOCK", good.CPU_MOONCAKE, capabilities=None),
        of(c.PTRACE, WARNING, "calls are filtered", "--cap-add=SYS_PTRACE", reading, capabilities=0, filtered=True),
        of(c.PTRACE, UNKNOWN, "not shown", "local_host", reading, capabilities=None),
    ]


def of_memory() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, memory.judge_memory, (good.MEMORY, need), **changes)

    m = memory
    return [
        of(m.AVAILABLE, FAILURE, "10.0 GiB available", "lower these sizes", good.LOCAL, available=10 * GIB),
        of(m.AVAILABLE, FAILURE, "100.0 GiB available", "lower these sizes", replace(good.A2, ranks=8), available=100 * GIB),
        of(m.AVAILABLE, UNKNOWN, "not shown", "compare", good.LOCAL, available=None),
        of(m.CACHE, WARNING, "300.0 GiB cached", "drop_caches", good.A2, cached=300 * GIB),
        of(m.CACHE, WARNING, "5.0 GiB free", "compact_memory", good.A2, free=5 * GIB),
        of(m.CACHE, UNKNOWN, "not shown", "/proc/meminfo", good.A2, cached=None),
        of(m.SHARED, FAILURE, "64.0 MiB free", "--shm-size=8g", good.LOCAL, shm_free=64 << 20, shm_total=64 << 20),
        of(m.SHARED, FAILURE, "is not there", "local_pool_root", good.LOCAL, shm_total=None),
        of(m.LIMIT, FAILURE, "4.0 GiB allowed", "--memory", good.LOCAL, limit=4 * GIB),
        of(m.LIMIT, UNKNOWN, "not shown", "memory.max", good.LOCAL, groups=False),
        of(m.LOCKED, WARNING, "8.0 MiB", "ulimit -l", good.A2, locked=8 << 20),
        of(m.LOCKED, UNKNOWN, "not shown", "ulimit -l", good.A2, locked=None),
    ]


def of_huge_pages() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, huge_pages.judge_huge_pages, (good.PAGES, good.RUNS, need), **changes)

    h, worker = huge_pages, good.A3_YUANRONG
    bare = (replace(good.PAGES.nodes[0], free=0), good.PAGES.nodes[1])
    short = (good.PAGES.nodes[0], replace(good.PAGES.nodes[1], free=10239))
    tcp = replace(good.LOCAL, backend="memcache", conf=good.memcache(protocol="host_tcp", dram_size="2GB"), ranks=2)
    return [
        of(h.TOTAL, FAILURE, "100 reserved", "echo 20560 > /proc/sys/vm/nr_hugepages", worker, total=100, free=20),
        of(h.TOTAL, FAILURE, "0 reserved", "echo 2048 >", tcp, total=0),
        of(h.TOTAL, WARNING, "100 reserved", "echo 10752 >", good.A2, total=100),
        of(h.TOTAL, UNKNOWN, "shows none", "HugePages_Total", worker, total=None),
        of(h.FREE, FAILURE, "5 of 200000 free", "echo 220475 >", worker, free=5),
        of(h.FREE, WARNING, "5 of 200000 free", "stop what holds them", good.A2, free=5),
        of(h.FREE, UNKNOWN, "not shown", "HugePages_Free", worker, free=None),
        of(h.NODE, WARNING, "node0 0 of 100000", "echo 110240 > /sys/devices/system/node/node0/", worker, nodes=bare),
        of(h.NODE, WARNING, "node1 10239 of 100000", "echo 100001 > /sys/devices/system/node/node1/", worker, nodes=short),
        of(h.RUNS, WARNING, "5 free runs of 2 MiB", "drop_caches", good.A3, small=5),
        of(h.RUNS, WARNING, "1 of 1 GiB", "compact_memory", good.A3, large=1),
        of(h.RUNS, UNKNOWN, "not shown", "as root", good.A3, small=None),
        of(h.RUNS, UNKNOWN, "at least 150000", "drop_caches", good.A3, large=1, partial=True),
    ]


def of_ssd() -> list[Case]:
    device, folder = "/dev/nvme1n1", "/data/pool"
    empty = Disk("block device", nbytes=GIB)

    def disk(level, found, fix, **changes):
        wrong, right = [Ssd(devices=((device, one),)) for one in (replace(empty, **changes), empty)]
        need = replace(good.A3_MEMCACHE, disks=Disks(devices=(device,)))
        return Case(ssd.DEVICE, level, found, fix, ssd.judge_ssd(wrong, need), ssd.judge_ssd(right, need))

    def directory(check, level, found, fix, **changes):
        right = Directory(folder, "", 100 * GIB, 50 * GIB)
        wrong = replace(right, **changes)
        need = replace(good.LOCAL, options=good.OPTIONS.model_copy(update={"local_ssd_size": 40 * GIB}))
        return Case(check, level, found, fix, *(ssd.judge_ssd(Ssd(directories=(one,)), need) for one in (wrong, right)))

    return [
        disk(FAILURE, "does not exist", "give another disk", kind="missing"),
        disk(FAILURE, "is no block device", "give another disk", kind="other"),
        disk(FAILURE, "is mounted at /data", "give another disk", mounted_at="/data"),
        disk(FAILURE, "in use by md0", "give another disk", held_by="md0"),
        disk(FAILURE, "2 partitions", "before anything is erased", partitions=2),
        disk(FAILURE, "xfs), which force_new_disk=true would destroy", "blkid", signature="xfs"),
        disk(UNKNOWN, "cannot be read", f"blkid {device}", signature=None),
        directory(ssd.DIRECTORY, FAILURE, "does not exist", f"mkdir -p {folder}", problem="does not exist"),
        directory(ssd.ROOM, FAILURE, "of 30 GiB free", "larger disk", total=30 * GIB, free=20 * GIB),
        directory(ssd.ROOM, WARNING, "20 of 100 GiB free", "make room", free=20 * GIB),
    ]


def of_ports() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, ports.judge_ports, (good.PORTS, need), **changes)

    p, port, master = ports, Endpoint("kv_port", ":20001"), Endpoint("mooncake_master", "10.0.0.9:50088")
    refused, silent = "Connection refused", "no answer within 2 s"
    shared = replace(good.LOCAL, backend="mooncake", hosts=2)
    near = tried(Endpoint("mooncake_master", "127.0.0.1:50088"), True, "0.1 ms", True)
    here = replace(good.PORTS, prefill=Tried(Endpoint("transfer_host", "10.0.0.1"), True, "10.0.0.1 is of this host", True))

    def transfer_host(level, found, outcome, text):
        wrong = replace(here, prefill=Tried(Endpoint("transfer_host", "10.0.0.1"), outcome, text))
        right, fix = ports.judge_ports(here, good.LOCAL), "one of `ip -br address` that decode reaches"
        return Case(p.TRANSFER_HOST, level, found, fix, ports.judge_ports(wrong, good.LOCAL), right)

    return [
        of(p.FREE, FAILURE, "Address already in use", "ss -ltnp", good.LOCAL, free=tried(port, False, "Address already in use")),
        of(p.FREE, UNKNOWN, "port 20001", "ss -ltn", good.LOCAL, free=tried(port, None, "?")),
        of(p.SERVICE, FAILURE, refused, "start it on this host", good.A2, services=tried(master, False, refused, True)),
        of(p.SERVICE, FAILURE, silent, "firewalls", good.A2, services=tried(master, False, silent)),
        of(p.PEER, FAILURE, silent, "nc -vz", good.LOCAL, peers=tried(Endpoint("peer", "h:1"), False, silent)),
        of(p.ADDRESS, FAILURE, "only this host reaches", "ip -br address", shared, services=near),
        transfer_host(FAILURE, "10.0.0.1 (transfer_host): 10.0.0.1 is not of this host", False, "10.0.0.1 is not of this host"),
        transfer_host(UNKNOWN, "cannot be told", None, "whether it is of this host cannot be told"),
    ]


def of_npu_tools() -> list[Case]:
    def of(check, level, found, fix, need, **changes):
        return case(check, level, found, fix, npu_tools.judge_npu_tools, (good.TOOLS, need), **changes)

    n = npu_tools
    verify = npu_tools.judge_npu_tools(good.TOOLS, good.A5_MEMCACHE)
    remote_h2d = replace(good.A3_YUANRONG, conf=good.A3_YUANRONG.conf.model_copy(update={"enable_remote_h2d": True}))
    return [
        of(n.SMI, FAILURE, "not there", "npu-smi:/usr/local/bin/npu-smi", good.A3, smi=None),
        of(n.SMI, FAILURE, "hangs", "dmesg", good.A3, smi=Ran(None, "")),
        of(n.SMI, FAILURE, "ends with 255: no driver", "install the driver", good.A3, smi=Ran(255, "x\nno driver\n")),
        of(n.TOPOLOGY, WARNING, "fails", "update the driver", good.A3, topology=Ran(1, "")),
        of(n.HCCN, FAILURE, "not there", "/usr/local/sbin", good.A2, hccn=False),
        of(n.LINK, FAILURE, "DOWN on NPU 1", "hccn_tool -i 1 -optical -g", good.A2, links=((0, "UP"), (1, "DOWN"))),
        of(n.LINK, UNKNOWN, "no answer for NPU 0", "-link -g", good.A2, links=((0, ""),)),
        of(n.ADDRESS, FAILURE, "none for NPU 0", "hccn_tool -i 0 -ip -s", good.A2, addresses=((0, ""),)),
        of(n.LINK, FAILURE, "DOWN on NPU 0", "hccn_tool -i 0 -optical -g", remote_h2d, links=((0, "DOWN"),)),
        of(n.PING, FAILURE, "packets lost", "-ping -g address 10.1.0.9", good.A2, pings=(("10.1.0.9", False),)),
        of(n.PING, UNKNOWN, "no clear answer", "-ping -g", good.A2, pings=(("10.1.0.9", None),)),
        of(n.PING, UNKNOWN, "are not here", "hccn_tool -i 0 -ping", good.A2, npu_peers=("10.1.0.9",)),
        Case(n.VERIFY, UNKNOWN, "not shown", "custom-op-secverify-mode -i $i -d 0", verify, []),
    ]


def of_lease_and_measure() -> list[Case]:
    def lease_of(check, level, found, fix, need, measured, **changes):
        wrong, right = lease.judge_lease(measured, replace(need, **changes)), lease.judge_lease(Measured(lease_s=40.0), need)
        return Case(check, level, found, fix, wrong, right)

    def speed(level, found, fix, measured, need=good.LOCAL):
        return Case(
            measure.SPEED, level, found, fix, measure.judge_measure(measured, need), measure.judge_measure(Measured(5, 5), need)
        )

    ttl, fast = "default_kv_lease_ttl", Measured(5.0, 5.0)
    served = replace(good.CPU_MOONCAKE, leases=((ttl, 40_000),), env={"ASCEND_TRANSFER_TIMEOUT": "10000"})
    slow, odd = {"ASCEND_TRANSFER_TIMEOUT": "45000"}, {"ASCEND_TRANSFER_TIMEOUT": "9s"}
    unset = replace(good.A2, leases=((ttl, 40_000),))
    return [
        lease_of(lease.CONFIGURED, FAILURE, "larger than ASCEND_TRANSFER_TIMEOUT=45000", f"raise {ttl}", served, None, env=slow),
        lease_of(lease.CONFIGURED, WARNING, "load_timeout_ms=30000", "above 30000 ms", served, None, leases=((ttl, 11_000),)),
        lease_of(
            lease.MEASURED, FAILURE, "larger than ASCEND_TRANSFER_TIMEOUT", "above 30000 ms", served, replace(fast, lease_s=5.0)
        ),
        lease_of(lease.MEASURED, WARNING, "load_timeout_ms", "--default_kv_lease_ttl", served, replace(fast, lease_s=20.0)),
        lease_of(lease.MEASURED, UNKNOWN, "not known in time", "--service", served, fast),
        lease_of(lease.TIMEOUTS, FAILURE, "ASCEND_TRANSFER_TIMEOUT", "<milliseconds>", served, None, env=odd),
        lease_of(lease.TIMEOUTS, FAILURE, "HCCL_RDMA_TIMEOUT", "<number>", unset, None, env={"HCCL_RDMA_TIMEOUT": "long"}),
        lease_of(
            lease.CONFIGURED,
            WARNING,
            "33064 ms while ASCEND_TRANSFER_TIMEOUT is not set",
            f"raise {ttl} above 33064 ms",
            unset,
            None,
            leases=((ttl, 31_000),),
        ),
        speed(
            FAILURE, "does not open", "start the store's", Measured(error="the store does not open: no master"), good.CPU_MOONCAKE
        ),
        speed(FAILURE, "does not open", "--shm-size", Measured(error="the store does not open: no space")),
        speed(FAILURE, "not the bytes written", "do not use", Measured(5.0, 5.0, same=False)),
        speed(WARNING, "get 0.50 GB/s", "CPUs and links", Measured(5.0, 0.5)),
        speed(UNKNOWN, "not measured", "--measure", None, good.CPU_MOONCAKE),
    ]


def of_configuration() -> list[Case]:
    c, quiet = configuration, configuration.judge_configuration("", [])
    right = configuration.judge_role("prefill", "kv_producer", "kv_producer")
    wrong = configuration.judge_role("prefill", "kv_both", "kv_producer")
    unset, here = "MMC_LOCAL_CONFIG_PATH: is not set: the memcache backend …", configuration.judge_device(good.LOCAL)
    local_on_npu = configuration.judge_device(replace(good.A2, backend="local"))
    return [
        Case(c.SOUND, FAILURE, "x: is refused", "mistakes.md", configuration.judge_configuration("x: is refused", []), quiet),
        Case(c.SOUND, WARNING, "y", "mistakes.md", configuration.judge_configuration("", ["y"]), quiet),
        Case(c.SOUND, FAILURE, "is not set", "export MMC_LOCAL_CONFIG_PATH=", configuration.judge_configuration(unset, []), quiet),
        Case(c.DEVICE, FAILURE, "not available yet", "on CPUs", configuration.judge_device(good.A2), here),
        Case(c.DEVICE, FAILURE, "does not reach the memory of npu", "that is accepted", local_on_npu, here),
        Case(c.ROLE, FAILURE, "kv_role is kv_both", '"kv_role": "kv_producer"', wrong, right),
    ]


CASES = [
    *of_configuration(),
    *of_versions(),
    *of_environment(),
    *of_files(),
    *of_container(),
    *of_memory(),
    *of_huge_pages(),
    *of_ssd(),
    *of_ports(),
    *of_npu_tools(),
    *of_lease_and_measure(),
]
