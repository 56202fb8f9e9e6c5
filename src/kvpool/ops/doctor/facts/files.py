"""Files, device nodes and interfaces that a series needs to see, above all inside a container."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from kvpool.ops.doctor.host import Host

LOOKED_AT = (
    "/dev/davinci_manager",
    "/dev/devmm_svm",
    "/dev/hisi_hdc",
    "/dev/ummu",
    "/dev/uburma",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/etc/hccn.conf",
    "/etc/hccl_rootinfo.json",
    "/etc/hixlep",
    "/etc/ascend_install.info",
    "/lib/route.conf",
    "/usr/bin/urma_admin",
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
)


@dataclass(frozen=True, slots=True)
class Files:
    """``there`` is what exists of LOOKED_AT, ``empty`` which files of it hold nothing; ``dev`` tells whether /dev can be listed.

    ``npus`` and ``gpus`` are the numbers of device nodes, ``npu_addresses`` the NPUs that hccn.conf gives an address;
    ``rootinfo`` tells whether hccl_rootinfo.json is JSON. ``interfaces`` is None where they cannot be listed."""

    there: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()
    dev: bool = True
    npus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    npu_addresses: tuple[int, ...] = ()
    rootinfo: bool = True
    rdma: int = 0
    verbs: bool = False
    interfaces: tuple[str, ...] | None = None


def read_files(host: Host) -> Files:
    there = frozenset(path for path in LOOKED_AT if host.exists(path))
    names = host.names("/dev")
    interfaces = host.names("/sys/class/net")
    return Files(
        there=there,
        empty=frozenset(path for path in there if path.endswith(".conf") and not (host.text(path) or "").strip()),
        dev=names is not None,
        npus=numbered(names or [], "davinci"),
        gpus=numbered(names or [], "nvidia"),
        npu_addresses=tuple(sorted(int(number) for number in re.findall(r"address_(\d+)\s*=", host.text("/etc/hccn.conf") or ""))),
        rootinfo=_is_json(host.text("/etc/hccl_rootinfo.json")),
        rdma=host.probe().rdma_devices(),
        verbs=any(name.startswith("uverbs") for name in host.names("/dev/infiniband") or []),
        interfaces=None if interfaces is None else tuple(interfaces),
    )


def numbered(names: list[str], prefix: str) -> tuple[int, ...]:
    """The numbers of device nodes ``<prefix><number>``."""
    rests = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    return tuple(sorted(int(rest) for rest in rests if rest.isascii() and rest.isdigit()))


def _is_json(text: str | None) -> bool:
    with suppress(ValueError):
        json.loads(text or "")
        return True
    return False
