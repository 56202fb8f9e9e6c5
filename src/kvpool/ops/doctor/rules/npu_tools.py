"""What the NPU's tools show: devices, topology, links, addresses, pings."""

from __future__ import annotations

from kvpool.ops.doctor.facts.npu_tools import NpuTools
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need
from kvpool.options.yuanrong_json import YuanrongOptions

AREA = "npu tools"
NPUS = "series a2, a3, a5"
WHO = "series a2; a3 over RoCE; remote H2D of yuanrong"
SMI = Check(AREA, "npu-smi", "npu-smi info works", NPUS)
TOPOLOGY = Check(AREA, "topology", "npu-smi info -t topo works", NPUS)
HCCN = Check(AREA, "hccn_tool", "hccn_tool is there", WHO)
LINK = Check(AREA, "link", "hccn_tool -link: every NPU's link is UP", WHO)
ADDRESS = Check(AREA, "address", "hccn_tool -ip: every NPU has an address", WHO)
PING = Check(AREA, "ping", "hccn_tool -ping: NPUs of other hosts answer", "--npu-peer is given")
VERIFY = Check(AREA, "operator signatures", "HDK does not refuse the store's own operators", "memcache on series a5")
CHECKS = (SMI, TOPOLOGY, HCCN, LINK, ADDRESS, PING, VERIFY)

MOUNT = "install the driver; for a container -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi -v /usr/local/sbin:/usr/local/sbin"


def judge_npu_tools(facts: NpuTools, need: Need) -> list[Finding]:
    if not need.npu:
        return []
    found = [_smi(facts), *_topology(facts)]
    if need.roce or (isinstance(need.conf, YuanrongOptions) and need.conf.enable_remote_h2d):
        found += _hccn(facts)
    found += [_ping(peer, good) for peer, good in facts.pings]
    if need.npu_peers and not facts.pings:
        fix = "run hccn_tool -i 0 -ping -g address <address> where the tool and the NPUs are"
        found.append(PING.unknown("hccn_tool or the NPUs are not here", "an answer", fix))
    if need.series == "a5" and need.backend == "memcache":
        found.append(_verify())
    return found


def _smi(facts: NpuTools) -> Finding:
    if facts.smi is None:
        return SMI.failure("npu-smi is not there", "npu-smi info", MOUNT)
    if facts.smi.code is None:
        return SMI.failure("npu-smi info hangs", "an answer", "look at dmesg: a hanging driver needs a reset of the host")
    if facts.smi.code:
        last = (facts.smi.output.strip().splitlines() or ["no output"])[-1]
        return SMI.failure(f"npu-smi info ends with {facts.smi.code}: {last[:120]}", "status 0", MOUNT)
    return SMI.ok("npu-smi info works")


def _topology(facts: NpuTools) -> list[Finding]:
    if facts.topology is None:
        return []
    if facts.topology.code != 0:
        return [TOPOLOGY.warning("npu-smi info -t topo fails", "the topology", "update the driver, or look on the host itself")]
    return [TOPOLOGY.ok("npu-smi info -t topo works")]


def _hccn(facts: NpuTools) -> list[Finding]:
    if not facts.hccn:
        return [HCCN.failure("hccn_tool is not there, or no NPU to ask it about", "hccn_tool", MOUNT)]
    down = [npu for npu, state in facts.links if state == "DOWN"]
    unclear = [npu for npu, state in facts.links if state not in ("UP", "DOWN")]
    without = [npu for npu, address in facts.addresses if not address]
    found = [HCCN.ok("hccn_tool is there")]
    if down:
        fix = f"look at cable and optical module: hccn_tool -i {down[0]} -optical -g"
        found.append(LINK.failure(f"DOWN on NPU {_listed(down)}", "UP", fix))
    elif unclear or not facts.links:
        found.append(LINK.unknown(f"no answer for NPU {_listed(unclear) or '0'}", "UP", "hccn_tool -i <N> -link -g"))
    else:
        found.append(LINK.ok(f"UP on {len(facts.links)} NPUs"))
    if without:
        fix = f"hccn_tool -i {without[0]} -ip -s address <address> netmask <mask> (changes the NPU; on the host)"
        found.append(ADDRESS.failure(f"none for NPU {_listed(without)}", "an address for each", fix))
    elif facts.addresses:
        found.append(ADDRESS.ok(", ".join(address for _, address in facts.addresses)))
    return found


def _listed(npus: list[int]) -> str:
    return ", ".join(map(str, npus))


def _ping(peer: str, good: bool | None) -> Finding:
    if good:
        return PING.ok(f"{peer} answers")
    fix = f"compare addresses and VLANs on both sides: hccn_tool -i 0 -ip -g; hccn_tool -i 0 -ping -g address {peer}"
    judge = PING.unknown if good is None else PING.failure
    return judge(f"{peer}: {'no clear answer' if good is None else 'packets lost'}", "an answer", fix)


def _verify() -> Finding:
    """Whether it is switched off shows in no query that is the same in all versions of npu-smi."""
    fix = (
        "on the bare metal, once: for i in {0..7}; do npu-smi set -t custom-op-secverify-enable -i $i -d 1; "
        "npu-smi set -t custom-op-secverify-mode -i $i -d 0; done"
    )
    return VERIFY.unknown("not shown by a query", "signature checks of custom operators off", fix)
