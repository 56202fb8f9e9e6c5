"""Whether this is a container, and what it was allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpool.ops.doctor.host import Host

IPC_LOCK, SYS_PTRACE, SYS_ADMIN = 14, 19, 21
_CGROUPS = re.compile(r"docker|kubepods|containerd|libpod|lxc")


@dataclass(frozen=True, slots=True)
class Container:
    """``inside`` is None where nothing can be told. ``capabilities`` are the bits of the effective set, None where unknown.

    ``host_network``: a network device of the host is seen; None where interfaces cannot be listed. ``filtered``: seccomp is on."""

    inside: bool | None = None
    capabilities: int | None = None
    host_network: bool | None = None
    filtered: bool | None = None

    def may(self, capability: int) -> bool | None:
        return None if self.capabilities is None else bool(self.capabilities >> capability & 1)


def read_container(host: Host) -> Container:
    status = host.text("/proc/self/status")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status or "", re.MULTILINE)
    seccomp = re.search(r"^Seccomp:\s*(\d)", status or "", re.MULTILINE)
    return Container(
        inside=_inside(host),
        capabilities=int(effective[1], 16) if effective else None,
        host_network=_host_network(host),
        filtered=seccomp[1] != "0" if seccomp else None,
    )


def _inside(host: Host) -> bool | None:
    if host.exists("/.dockerenv") or host.exists("/run/.containerenv") or host.env.get("KUBERNETES_SERVICE_HOST"):
        return True
    groups = host.text("/proc/self/cgroup")
    return None if groups is None else bool(_CGROUPS.search(groups))


def _host_network(host: Host) -> bool | None:
    """Containers with a network of their own see only lo and virtual interfaces, which have no device behind them."""
    names = host.names("/sys/class/net")
    if names is None:
        return None
    return any(host.exists(f"/sys/class/net/{name}/device") for name in names)
