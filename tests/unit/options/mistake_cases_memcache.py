"""How each mistake in configuring MemCache is made; see mistake_cases.py."""

from __future__ import annotations

from tests.unit.options.mistake_cases import GIB, LOCAL, META, Case, L, checked, on

from kvpool.options.block_device import Disk


def local(*lines, deployment=None, env=()):
    """`config check` of an mmc-local.conf with further lines."""
    text = LOCAL + "".join(f"{line}\n" for line in lines)
    return lambda folder: checked(folder, {"mmc-local.conf": text}, deployment=deployment or on(), env=dict(env))


def meta(*lines, **given):
    """The same of an mmc-meta.conf."""
    return lambda folder: checked(folder, {"mmc-meta.conf": META + "".join(f"{line}\n" for line in lines)}, **given)


def files(texts, **given):
    return lambda folder: checked(folder, texts, **given)


NPU = {"MEMFABRIC_HYBRID_EXTEND_LIB_PATH": "/lib64"}
SDMA = f"{L}.protocol = device_sdma"
METRICS = "ock.mmc.meta_service.metrics_url = http://h:{}"
GIVES = f"{L}.dram.size = 600GB\n"
TTL = "ock.mmc.meta.lease_ttl_ms = 11000"

FILES = [
    Case(
        "which the library takes as part of it",
        local(f"{L}.world_size = 256 # ranks"),
        local("# ranks", f"{L}.world_size = 256"),
    ),
    Case(
        "of the meta service",
        files({"mmc-local.conf": LOCAL, "meta": META.replace("6000", "6001")}),
        files({"mmc-local.conf": LOCAL, "meta": META}),
    ),
    Case(
        "differs from tcp://h:5000 of",
        files({"a.conf": LOCAL.replace("h:5000", "h:5001"), "b.conf": LOCAL}),
        files({"a.conf": LOCAL, "b.conf": LOCAL}),
    ),
    Case(
        "is larger than max.dram.size=",
        local(f"{L}.dram.size = 2GB", f"{L}.max.dram.size = 1GB"),
        local(f"{L}.dram.size = 2GB", f"{L}.max.dram.size = 2GB"),
    ),
    Case(
        "is less than dram.size=",
        files({"engine.conf": LOCAL + f"{L}.dram.size = 0GB\n{L}.max.dram.size = 500GB\n", "standalone.conf": LOCAL + GIVES}),
        files({"engine.conf": LOCAL + f"{L}.dram.size = 0GB\n{L}.max.dram.size = 600GB\n", "standalone.conf": LOCAL + GIVES}),
    ),
    Case(
        "processes with other sizes of memory than this one (0GB) cannot join",
        local(f"{L}.dram.size = 0GB"),
        local(f"{L}.dram.size = 0GB", f"{L}.max.dram.size = 1024GB"),
    ),
    Case(
        "is not a multiple of 1GB, in which NPUs map it",
        local(SDMA, f"{L}.dram.size = 1536MB", env=NPU),
        local(SDMA, f"{L}.dram.size = 2GB", env=NPU),
    ),
    Case(
        f"{L}.dram.size=1610612736: is not a multiple of 1GB",
        local(f"{L}.dram.size = 1536MB", deployment=on(device="npu", hardware="A3")),
        local(f"{L}.dram.size = 2GB", deployment=on(device="npu", hardware="A3")),
    ),
    Case(
        "is more than 1TB, the most that one process can give",
        local(f"{L}.dram.size = 1025GB"),
        local(f"{L}.dram.size = 1TB"),
    ),
    Case(
        "is required, at least 644245094400, since dram.size differs",
        files({"engine.conf": LOCAL + f"{L}.dram.size = 1GB\n", "standalone.conf": LOCAL + GIVES}),
        files({"engine.conf": LOCAL + f"{L}.dram.size = 1GB\n", "standalone.conf": LOCAL + f"{L}.dram.size = 1GB\n"}),
    ),
    Case(
        "ranks of this engine",
        local(f"{L}.world_size = 4", deployment=on(tp=8)),
        local(f"{L}.world_size = 8", deployment=on(tp=8)),
    ),
    Case(
        "GB of memory are free",
        local(f"{L}.dram.size = 2GB", deployment=on(local_ranks=8, memory=15 * GIB)),
        local(f"{L}.dram.size = 2GB", deployment=on(local_ranks=8, memory=16 * GIB)),
    ),
    Case(
        "set host_shm (one host), host_tcp or host_rdma",
        local(SDMA, deployment=on(device="cpu"), env=NPU),
        local(f"{L}.protocol = host_shm", deployment=on(device="cpu")),
    ),
    Case(
        "is for the series A3, not A2: set device_rdma",
        local(SDMA, deployment=on(device="npu", hardware="A2"), env=NPU),
        local(SDMA, deployment=on(device="npu", hardware="A3"), env=NPU),
    ),
    Case(
        "host_rdma: this host shows no RDMA device",
        local(deployment=on(device="cpu", rdma=0)),
        local(f"{L}.protocol = host_shm", deployment=on(device="cpu", rdma=0)),
    ),
    Case(
        "takes dram.size from huge pages, and none are reserved",
        local(f"{L}.protocol = host_tcp", f"{L}.dram.size = 1GB", deployment=on(device="cpu", pages=0)),
        local(f"{L}.protocol = host_tcp", f"{L}.dram.size = 1GB", deployment=on(device="cpu", pages=512)),
    ),
    Case(
        "works within one host only",
        local(f"{L}.protocol = host_shm", deployment=on(hosts=2)),
        local(f"{L}.protocol = host_tcp", deployment=on(hosts=2)),
    ),
    Case(
        "is reached from one host only, but 2 hosts share the pool",
        files({"mmc-local.conf": LOCAL.replace("//h:", "//127.0.0.1:")}, deployment=on(hosts=2)),
        local(deployment=on(hosts=2)),
    ),
    Case("MEMFABRIC_HYBRID_EXTEND_LIB_PATH is not set", local(SDMA), local(SDMA, env=NPU)),
    Case(
        "is no folder: device protocols load their libraries from there",
        local(SDMA, deployment=on(folder=False), env=NPU),
        local(SDMA, env=NPU),
    ),
    Case(
        "has the port of the proxy (8000)", meta(METRICS.format(8000), proxy_port=8000), meta(METRICS.format(8001), proxy_port=8000)
    ),
    Case(
        "has the port that the proxies take by default (8000)",
        meta(METRICS.format(8000)),
        meta(METRICS.format(8000), proxy_port=9000),
    ),
    Case("has the port of ock.mmc.meta_service_url", meta(METRICS.format(5000)), meta(METRICS.format(5001))),
    Case(
        "must be below evict_threshold_high=",
        meta("ock.mmc.evict_threshold_high = 70", "ock.mmc.evict_threshold_low = 70"),
        meta("ock.mmc.evict_threshold_high = 70", "ock.mmc.evict_threshold_low = 60"),
    ),
    Case(
        "ock.mmc.meta.lease_ttl_ms=11000: must be larger than ASCEND_CONNECT_TIMEOUT=",
        meta(TTL, env={"ASCEND_CONNECT_TIMEOUT": "20000"}),
        meta(TTL, env={"ASCEND_CONNECT_TIMEOUT": "10000"}),
    ),
]


def ssd(*lines, path="/dev/nvme0n1", count=1, memory_gb=10, dram="600GB", deployment=None):
    """An mmc-local.conf with the SSD tier; None leaves a line out."""
    given = {
        f"{L}.dram.size": dram,
        f"{L}.max.dram.size": "1024GB",
        "ubsio.disk.path": path,
        "ubsio.mem.size_in_gb": memory_gb,
        "ubsio.standalone.device_count": count,
    }
    written = [f"{key} = {value}" for key, value in given.items() if value is not None]
    return local(f"{L}.storage.enabled = true", *written, *lines, deployment=deployment)


def disk(**facts):
    return ssd(deployment=on(disk=Disk(**{"kind": "block device", **facts})))


RIGHT = ssd()
DISK = [
    Case("ubsio.disk.path=null: is required", ssd(path=None), RIGHT),
    Case("must be at least 5 with storage.enabled", ssd(memory_gb=4), ssd(memory_gb=5)),
    Case(
        "local services take",
        ssd(count=4, memory_gb=51, deployment=on(memory=200 * GIB)),
        ssd(count=4, memory_gb=50, deployment=on(memory=200 * GIB)),
    ),
    Case("ubsio.standalone.device_count=null: is required", ssd(count=None), RIGHT),
    Case(
        "local services of this engine give memory: set",
        ssd(count=1, deployment=on(local_ranks=8)),
        ssd(count=8, deployment=on(tp=16, local_ranks=8)),
    ),
    Case(
        'ubsio.disk.path="/dev/nvme9n1": does not exist',
        ssd(path="/dev/nvme9n1", deployment=on(disk=Disk("missing"))),
        ssd(path="/dev/nvme9n1"),
    ),
    Case("is no block device", disk(kind="other"), RIGHT),
    Case("has no size: a loop device needs a file", disk(nbytes=0), disk(nbytes=GIB)),
    Case("is mounted at", disk(mounted_at="/data"), RIGHT),
    Case("is in use by", disk(held_by="md0"), RIGHT),
    Case("which force_new_disk=true would destroy", disk(signature="xfs"), RIGHT),
    Case("names of this kind move from disk to disk between boots", ssd(path="/dev/nvme0n1:/dev/sdb1"), RIGHT),
    Case("names /dev/nvme0n1 twice", ssd(path="/dev/nvme0n1:/dev/nvme0n1"), ssd(path="/dev/nvme0n1:/dev/nvme1n1")),
    Case("cannot be read, so nobody knows whether it is empty", disk(signature=None), RIGHT),
    Case(
        "what is on the disks cannot be recovered yet",
        ssd("ubsio.standalone.force_new_disk = false"),
        ssd("ubsio.standalone.force_new_disk = true"),
    ),
    Case("storage.enabled has no effect in a process with", ssd(dram="0GB"), RIGHT),
]

AREAS = {"mmc-local.conf and mmc-meta.conf": FILES, "Disk tier of MemCache (UBS IO)": DISK}
