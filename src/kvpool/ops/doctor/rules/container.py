"""Flags that a container was started with, as far as they show from inside."""

from __future__ import annotations

from kvpool.ops.doctor.facts.container import IPC_LOCK, SYS_ADMIN, SYS_PTRACE, Container
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need

AREA = "container"
INSIDE = "inside a container"
NETWORK = Check(
    AREA, "network", "the host's network (--net=host), where other hosts must reach this one", f"{INSIDE}, several hosts or NPUs"
)
PRIVILEGED = Check(AREA, "privileged", "--privileged, as the guides start containers with NPUs", f"{INSIDE}, series a2, a3, a5")
LOCK = Check(AREA, "IPC_LOCK", "memory may be pinned (--cap-add=IPC_LOCK)", f"{INSIDE}, rdma and host_rdma")
PTRACE = Check(AREA, "SYS_PTRACE", "transfer_engine process_vm may read other processes", "transfer_engine process_vm")
CHECKS = (NETWORK, PRIVILEGED, LOCK, PTRACE)

NEEDED = "the host's network"
FIX = "--net=host (in Kubernetes hostNetwork: true), or publish every port of the store"


def judge_container(facts: Container, need: Need) -> list[Finding]:
    found: list[Finding] = []
    if facts.inside is None and (need.npu or need.several_hosts):
        found.append(NETWORK.unknown("whether this is a container is not shown", NEEDED, FIX))
    if facts.inside:
        if need.npu or need.several_hosts:
            found.append(_network(facts))
        if need.npu:
            found.append(_privileged(facts))
        if need.protocol in ("rdma", "host_rdma"):
            found.append(_lock(facts))
    if need.pull is not None and need.pull.transfer_engine == "process_vm":
        found.append(_ptrace(facts))
    return found


def _network(facts: Container) -> Finding:
    if facts.host_network:
        return NETWORK.ok("devices of the host's network are seen")
    if facts.host_network is None:
        return NETWORK.unknown("network devices cannot be listed", NEEDED, FIX)
    return NETWORK.warning("no network device of the host is seen", NEEDED, FIX)


def _privileged(facts: Container) -> Finding:
    fix = "--privileged=true, or each device with --device and --cap-add=SYS_ADMIN --cap-add=IPC_LOCK"
    return _judged(PRIVILEGED, facts.may(SYS_ADMIN), "privileged", "not privileged", fix)


def _lock(facts: Container) -> Finding:
    return _judged(LOCK, facts.may(IPC_LOCK), "IPC_LOCK", "no IPC_LOCK", "--cap-add=IPC_LOCK --ulimit memlock=-1")


def _ptrace(facts: Container) -> Finding:
    """Within one user namespace the kernel may allow it without the capability; a container's filter mostly does not."""
    lacking = "no SYS_PTRACE" + (", and system calls are filtered" if facts.filtered else "")
    fix = '--cap-add=SYS_PTRACE, or "transfer_engine": "local_host"'
    return _judged(PTRACE, facts.may(SYS_PTRACE), "SYS_PTRACE", lacking, fix)


def _judged(check: Check, allowed: bool | None, needed: str, lacking: str, fix: str) -> Finding:
    """Of one capability; None: this system does not show it."""
    if allowed:
        return check.ok(needed)
    return check.unknown("not shown", needed, fix) if allowed is None else check.warning(lacking, needed, fix)
