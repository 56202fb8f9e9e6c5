"""Reads the host and applies every rule."""

from __future__ import annotations

from kvpool.ops.doctor.choosing import Asked, choose
from kvpool.ops.doctor.facts.container import read_container
from kvpool.ops.doctor.facts.files import read_files
from kvpool.ops.doctor.facts.free_runs import FreeRuns, read_free_runs
from kvpool.ops.doctor.facts.huge_pages import read_huge_pages
from kvpool.ops.doctor.facts.memory import read_memory
from kvpool.ops.doctor.facts.npu_tools import NpuTools, read_npu_tools
from kvpool.ops.doctor.facts.ports import read_ports
from kvpool.ops.doctor.facts.ssd import read_ssd
from kvpool.ops.doctor.facts.versions import read_versions
from kvpool.ops.doctor.finding import Finding
from kvpool.ops.doctor.host import Host
from kvpool.ops.doctor.measuring import measure
from kvpool.ops.doctor.need import Need
from kvpool.ops.doctor.rules.configuration import judge_device
from kvpool.ops.doctor.rules.container import judge_container
from kvpool.ops.doctor.rules.environment import judge_environment
from kvpool.ops.doctor.rules.files import judge_files
from kvpool.ops.doctor.rules.huge_pages import judge_huge_pages
from kvpool.ops.doctor.rules.lease import judge_lease
from kvpool.ops.doctor.rules.measure import judge_measure
from kvpool.ops.doctor.rules.memory import judge_memory
from kvpool.ops.doctor.rules.npu_tools import judge_npu_tools
from kvpool.ops.doctor.rules.ports import judge_ports
from kvpool.ops.doctor.rules.ssd import judge_ssd
from kvpool.ops.doctor.rules.versions import judge_versions
from kvpool.stores.local.pool_dir import default_root


def examine(asked: Asked, host: Host) -> tuple[Need, list[Finding]]:
    """What the host needs, and every finding. Reads only, but for what measuring writes. OptionError for wrong flags."""
    need, said = choose(asked, host.env, host.probe())
    files, ports = read_files(host), read_ports(need)
    npus = files.npus
    measured = measure(need) if need.measure else None
    runs = read_free_runs(host) if need.contiguous else FreeRuns()
    said += judge_device(need)
    found = judge_versions(read_versions(host), need)
    found += judge_environment(files, ports, need)
    found += judge_files(files, need)
    found += judge_container(read_container(host), need)
    found += judge_memory(read_memory(host, pool_folder(need)), need)
    found += judge_huge_pages(read_huge_pages(host), runs, need)
    found += judge_ssd(read_ssd(host, need.disks), need)
    found += judge_ports(ports, need)
    found += judge_npu_tools(read_npu_tools(host, npus, need.npu_peers) if need.npu else NpuTools(), need)
    found += judge_lease(measured, need)
    found += judge_measure(measured, need)
    return need, without_repeats(said, found) + found


def pool_folder(need: Need) -> str:
    """Where the local pool lies, or will."""
    if need.backend != "local" or need.options is None:
        return ""
    return f"{need.options.local_pool_root or default_root()}/{need.options.local_pool_name}"


def without_repeats(said: list[Finding], found: list[Finding]) -> list[Finding]:
    """Findings on the configuration without those that an area repeats in the same words, with a fix of its own."""
    texts = [finding.found for finding in found if finding.fix]
    return [one for one in said if not any(one.found.endswith(text) for text in texts)]
