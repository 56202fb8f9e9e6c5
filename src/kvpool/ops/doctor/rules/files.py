"""Files, mounts and device nodes by series."""

from __future__ import annotations

from kvpool.ops.doctor.facts.files import Files
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need

AREA = "files"
NPU_NODES = Check(
    AREA, "npu devices", "/dev/davinci<N> and the manager nodes; on a5 /dev/ummu and /dev/uburma", "series a2, a3, a5"
)
HCCN = Check(AREA, "hccn.conf", "/etc/hccn.conf is there, with an address for each NPU that uses RoCE", "series a2, a3, a5")
DRIVER = Check(AREA, "driver folder", "/usr/local/Ascend/driver and /usr/local/dcmi are mounted", "series a2, a3, a5")
ROOTINFO = Check(AREA, "hccl_rootinfo.json", "/etc/hccl_rootinfo.json is JSON", "series a5")
ROUTE = Check(AREA, "route.conf", "/lib/route.conf is there and not empty", "series a5")
URMA = Check(AREA, "urma_admin", "/usr/bin/urma_admin and /etc/hixlep are mounted", "series a5")
INSTALL_INFO = Check(AREA, "ascend_install.info", "/etc/ascend_install.info is mounted", "yuanrong on series a2, a3, a5")
GPU_NODES = Check(AREA, "gpu devices", "/dev/nvidia<N>, nvidiactl, nvidia-uvm", "series cuda")
RDMA = Check(AREA, "rdma devices", "the kernel and /dev/infiniband show an RDMA device", "protocols rdma and host_rdma")
CHECKS = (NPU_NODES, HCCN, DRIVER, ROOTINFO, ROUTE, URMA, INSTALL_INFO, GPU_NODES, RDMA)


def judge_files(facts: Files, need: Need) -> list[Finding]:
    found: list[Finding] = []
    if need.npu:
        found += [
            _npu_nodes(facts, need),
            _hccn(facts, need),
            _mounted(DRIVER, facts, "/usr/local/Ascend/driver", "/usr/local/dcmi"),
        ]
    if need.series == "a5":
        found += [_rootinfo(facts), _route(facts), _mounted(URMA, facts, "/usr/bin/urma_admin", "/etc/hixlep")]
    if need.npu and need.backend == "yuanrong":
        found.append(_mounted(INSTALL_INFO, facts, "/etc/ascend_install.info"))
    if need.series == "cuda":
        found.append(_gpu_nodes(facts))
    if need.protocol in ("rdma", "host_rdma"):
        found.append(_rdma(facts))
    return found


def _mounted(check: Check, facts: Files, *paths: str) -> Finding:
    missing = [path for path in paths if path not in facts.there]
    needed = " and ".join(paths)
    if not missing:
        return check.ok(needed)
    flags = " ".join(f"-v {path}:{path}" for path in missing)
    return check.failure(f"{', '.join(missing)} missing", needed, f"install it on the host; for a container {flags}")


def _npu_nodes(facts: Files, need: Need) -> Finding:
    nodes = ["/dev/davinci_manager", "/dev/hisi_hdc"]
    nodes += ["/dev/ummu", "/dev/uburma"] if need.series == "a5" else ["/dev/devmm_svm"]
    missing = [] if facts.npus else ["/dev/davinci0"]
    missing += [node for node in nodes if node not in facts.there]
    needed = f"/dev/davinci<N>, {', '.join(nodes)}"
    if not facts.dev:
        return NPU_NODES.unknown("/dev cannot be listed", needed, "look with `ls /dev`")
    if missing:
        flags = " ".join(f"--device={node}" for node in missing)
        return NPU_NODES.failure(f"{', '.join(missing)} missing", needed, f"install the driver; for a container {flags}")
    return NPU_NODES.ok(f"{len(facts.npus)} NPUs and their manager nodes", needed)


def _hccn(facts: Files, need: Need) -> Finding:
    path, fix = (
        "/etc/hccn.conf",
        "set the NPUs' addresses with hccn_tool on the host; for a container -v /etc/hccn.conf:/etc/hccn.conf",
    )
    if path not in facts.there:
        return HCCN.failure(f"{path} missing", path, fix)
    if path in facts.empty:
        return HCCN.failure(f"{path} is empty", "an address for each NPU", fix)
    without = sorted(set(facts.npus) - set(facts.npu_addresses))
    if need.roce and without:
        return HCCN.failure(f"no address for NPU {', '.join(map(str, without))}", "an address for each NPU", fix)
    return HCCN.ok(f"addresses of {len(facts.npu_addresses)} NPUs")


def _rootinfo(facts: Files) -> Finding:
    path = "/etc/hccl_rootinfo.json"
    if path in facts.there and facts.rootinfo:
        return ROOTINFO.ok(path)
    found = "is not JSON" if path in facts.there else "missing"
    return ROOTINFO.failure(f"{path} {found}", path, f"take it from the host: -v {path}:{path}")


def _route(facts: Files) -> Finding:
    path = "/lib/route.conf"
    if path in facts.there and path not in facts.empty:
        return ROUTE.ok(path)
    found = "is empty" if path in facts.there else "missing"
    return ROUTE.failure(f"{path} {found}", path, f"-v {path}:{path}, and update it inside the container")


def _gpu_nodes(facts: Files) -> Finding:
    missing = [] if facts.gpus else ["/dev/nvidia0"]
    missing += [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm") if node not in facts.there]
    if not facts.dev:
        return GPU_NODES.unknown("/dev cannot be listed", "/dev/nvidia0", "look with `nvidia-smi`")
    if missing:
        return GPU_NODES.failure(
            f"{', '.join(missing)} missing", "/dev/nvidia<N>", "install the driver; for a container --gpus all"
        )
    return GPU_NODES.ok(f"{len(facts.gpus)} GPUs")


def _rdma(facts: Files) -> Finding:
    needed = "an RDMA device"
    if not facts.rdma:
        return RDMA.failure("the kernel shows no RDMA device", needed, "load its driver, or set a protocol over TCP")
    if not facts.verbs:
        return RDMA.failure(
            "/dev/infiniband has no uverbs", needed, "for a container --device=/dev/infiniband and --ulimit memlock=-1"
        )
    return RDMA.ok(f"{facts.rdma} RDMA devices")
