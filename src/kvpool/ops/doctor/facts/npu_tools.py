"""What npu-smi and hccn_tool show. Only their queries are used; nothing is set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.ops.doctor.host import Host, Ran


@dataclass(frozen=True, slots=True)
class NpuTools:
    """None: the tool is not there. ``links`` and ``addresses`` are by NPU: UP or DOWN, an address; "" where the answer was not
    understood. ``pings`` tells for each address of another NPU whether all packets came back."""

    smi: Ran | None = None
    topology: Ran | None = None
    hccn: bool = False
    links: tuple[tuple[int, str], ...] = ()
    addresses: tuple[tuple[int, str], ...] = ()
    pings: tuple[tuple[str, bool | None], ...] = ()


def read_npu_tools(host: Host, npus: Sequence[int], peers: Sequence[str]) -> NpuTools:
    """``npus`` are those of this host; peers are pinged from the first of them. A tool that hangs is asked once."""
    smi = host.run(["npu-smi", "info"])
    topology = host.run(["npu-smi", "info", "-t", "topo"]) if smi is not None and smi.code is not None else None
    links: list[tuple[int, str]] = []
    addresses: list[tuple[int, str]] = []
    hccn = False
    for npu in npus:
        ran = host.run(["hccn_tool", "-i", str(npu), "-link", "-g"])
        hccn = ran is not None
        if ran is None or ran.code is None:
            break
        links.append((npu, _word(r"link status:\s*(UP|DOWN)", ran.output).upper()))
        ran = host.run(["hccn_tool", "-i", str(npu), "-ip", "-g"])
        if ran is None or ran.code is None:
            break
        addresses.append((npu, _word(r"ipaddr:\s*([0-9a-fA-F.:]+)", ran.output)))
    pings = tuple((peer, _ping(host, npus[0], peer)) for peer in peers) if npus and hccn else ()
    return NpuTools(smi, topology, hccn, tuple(links), tuple(addresses), pings)


def _ping(host: Host, npu: int, peer: str) -> bool | None:
    ran = host.run(["hccn_tool", "-i", str(npu), "-ping", "-g", "address", peer])
    match = re.search(r"(\d+) packets? transmitted,\s*(\d+)", ran.output) if ran is not None else None
    return None if match is None else match[1] == match[2] != "0"


def _word(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.IGNORECASE)
    return match[1] if match else ""
