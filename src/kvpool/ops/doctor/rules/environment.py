"""Variables: the deployment guides' table by series, the interfaces they name, and the seed of block hashes."""

from __future__ import annotations

from kvpool.ops.doctor.facts.files import Files
from kvpool.ops.doctor.facts.ports import Ports
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import HARDWARE, Need
from kvpool.options.deployment import Deployment
from kvpool.options.environment import HASH_SEED, RESOURCE_CONFIG, hash_seed, hash_warning
from kvpool.options.errors import OptionError
from kvpool.options.hardware_env import INTRA_ROCE, LOCAL_RESOURCES, hardware_warnings
from kvpool.options.jsonfile import JsonError, read_json
from kvpool.options.mooncake_rules import FABRIC_MEMORY
from kvpool.options.resources import read_resources

AREA = "environment"
SEED = Check(AREA, "hash seed", "PYTHONHASHSEED: a must with xxhash algorithms; else the same, or unset, everywhere")
CONFIG = Check(AREA, "store configuration", "the variable that names the store's file, as the engine will see it", "other backends")
ROCE = Check(AREA, "roce", "HCCL_INTRA_ROCE_ENABLE=1", "series a2; a3 over RoCE")
INTERFACES = Check(
    AREA, "interfaces", "HCCL_, GLOO_ and TP_SOCKET_IFNAME name an interface of this host", "series a2; a3 over RoCE"
)
ADDRESS = Check(AREA, "interface address", "HCCL_IF_IP is an address of this host", "series a2; a3 over RoCE")
HCCS = Check(
    AREA, "hccs", "ACL_OP_INIT_MODE=1; with mooncake and memcache ASCEND_ENABLE_USE_FABRIC_MEM=1", "series a3, not over RoCE"
)
A5_LINK = Check(AREA, "uboe or ub", "ASCEND_GLOBAL_RESOURCE_CONFIG (UBOE) or ASCEND_LOCAL_COMM_RES (UB)", "series a5")
RESOURCES = Check(AREA, "resources", "ASCEND_GLOBAL_RESOURCE_CONFIG is JSON with known fields", "series a2, a3, a5")
TOOLKIT = Check(AREA, "toolkit", "set_env.sh of CANN was sourced", "series a2, a3, a5")
DEVICES = Check(AREA, "visible devices", "ASCEND_RT_VISIBLE_DEVICES names NPUs that are here", "series a2, a3, a5")
LIBRARIES = Check(AREA, "libraries", "LD_LIBRARY_PATH has the store's libraries", "mooncake and memcache on series a2, a3, a5")
CPU_SPACE = Check(AREA, "cpu cache", "VLLM_CPU_KVCACHE_SPACE leaves memory for the pool", "series cpu")
CHECKS = (SEED, CONFIG, ROCE, INTERFACES, ADDRESS, HCCS, A5_LINK, RESOURCES, TOOLKIT, DEVICES, LIBRARIES, CPU_SPACE)

HCCL_IFNAME = "HCCL_SOCKET_IFNAME"
IFNAMES = (HCCL_IFNAME, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
UBOE = '{"comm_resource_config.protocol_desc":["uboe:device"]}'
UB = '{"version":"1.3"}'


def judge_environment(files: Files, ports: Ports, need: Need) -> list[Finding]:
    found = [_seed(need)]
    if need.conf_variable:
        found += _config(need)
    if need.series == "cpu":
        found.append(_cpu_space(need))
    if not need.npu:
        return found
    found += [_toolkit(need), _resources(need), *_devices(files, need), *_libraries(need)]
    if need.roce:
        found += [_roce(need), *_interfaces(files, need), _address(ports, need)]
    elif need.series == "a3":
        found.append(_hccs(need))
    else:
        found.append(_a5_link(need))
    return found


def _seed(need: Need) -> Finding:
    if warning := hash_warning(need.env, need.hash_algo):
        return SEED.failure(warning, "a value, the same everywhere", f"export {HASH_SEED}=0 on all hosts")
    return SEED.ok(hash_seed(need.env), "the same on all instances that share")


def _config(need: Need) -> list[Finding]:
    """The file may have been given to doctor only. Where there is none at all, the configuration's own findings say so."""
    variable, value = need.conf_variable, need.env.get(need.conf_variable, "")
    if value and (not need.conf_path or value == need.conf_path):
        return [CONFIG.ok(f"{variable}={value}")]
    if not need.conf_path:
        return []
    found = f"{variable}={value}" if value else f"{variable} is unset"
    return [CONFIG.failure(found, need.conf_path, f"export {variable}={need.conf_path} for every vLLM process")]


def _cpu_space(need: Need) -> Finding:
    value = need.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    if value:
        return CPU_SPACE.ok(f"VLLM_CPU_KVCACHE_SPACE={value}")
    found = "VLLM_CPU_KVCACHE_SPACE is unset: vLLM takes nearly all memory"
    return CPU_SPACE.warning(found, "GiB for vLLM", "export VLLM_CPU_KVCACHE_SPACE=4, or what the model needs")


def _roce(need: Need) -> Finding:
    """For A2 the words are those of the option rules, which say the same at start."""
    lines = hardware_warnings(need.env, Deployment(device="npu", hardware=HARDWARE[need.series]))
    if lines or need.env.get(INTRA_ROCE) != "1":
        found = lines[0] if lines else f"{INTRA_ROCE} is not 1"
        return ROCE.failure(found, f"{INTRA_ROCE}=1", f"export {INTRA_ROCE}=1")
    return ROCE.ok(f"{INTRA_ROCE}=1")


def _interfaces(files: Files, need: Need) -> list[Finding]:
    found = []
    for variable in IFNAMES:
        value = need.env.get(variable, "")
        names = files.interfaces
        known = ", ".join(name for name in names or () if name != "lo")
        if not value:
            found.append(INTERFACES.failure(f"{variable} is unset", "an interface", f"export {variable}=<one of {known or '…'}>"))
        elif names is None:
            found.append(INTERFACES.unknown(f"{variable}={value}", "an interface of this host", "compare with `ip -br link`"))
        elif not any(_selects(variable, value, name) for name in names):
            found.append(INTERFACES.failure(f"{variable}={value}", f"one of {known}", f"export {variable} with one of these"))
        else:
            found.append(INTERFACES.ok(f"{variable}={value}"))
    return found


def _selects(variable: str, value: str, name: str) -> bool:
    """HCCL takes a list of prefixes, after = of whole names, after ^ of what not to use; the others take whole names only."""
    if variable != HCCL_IFNAME:
        return name in value.split(",")
    others = value.startswith("^")
    value = value.removeprefix("^")
    items = [item for item in value.removeprefix("=").split(",") if item]
    named = name in items if value.startswith("=") else name.startswith(tuple(items))
    return name != "lo" and not named if others else named


def _address(ports: Ports, need: Need) -> Finding:
    value = need.env.get("HCCL_IF_IP", "")
    if not value:
        return ADDRESS.failure("HCCL_IF_IP is unset", "this host's address", "export HCCL_IF_IP=<address of the interface>")
    if ports.interface_address is None:
        return ADDRESS.unknown(f"HCCL_IF_IP={value}", "this host's address", "compare with `ip -br address`")
    if not ports.interface_address:
        return ADDRESS.failure(f"HCCL_IF_IP={value} is not of this host", "this host's address", "see `ip -br address`")
    return ADDRESS.ok(f"HCCL_IF_IP={value}")


def _hccs(need: Need) -> Finding:
    wanted = ["ACL_OP_INIT_MODE"] + ([FABRIC_MEMORY] if need.backend in ("mooncake", "memcache") else [])
    missing = [name for name in wanted if need.env.get(name) != "1"]
    needed = " ".join(f"{name}=1" for name in wanted)
    if missing:
        fix = "export " + " ".join(f"{name}=1" for name in missing) + "; where the links are RoCE give --link roce"
        return HCCS.warning(f"{', '.join(missing)} not 1", needed, fix)
    return HCCS.ok(needed)


def _a5_link(need: Need) -> Finding:
    if lines := hardware_warnings(need.env, Deployment(device="npu", hardware="A5")):
        fix = f"UBOE: export {RESOURCE_CONFIG}='{UBOE}'; UB: export {LOCAL_RESOURCES}='{UB}'"
        return A5_LINK.failure(lines[0], "the one that the links are of", fix)
    uses = [name for name in (RESOURCE_CONFIG, LOCAL_RESOURCES) if need.env.get(name)]
    if need.link == "uboe" and RESOURCE_CONFIG not in uses:
        return A5_LINK.failure(f"{LOCAL_RESOURCES} alone", "UBOE", f"export {RESOURCE_CONFIG}='{UBOE}'")
    if need.link == "ub" and LOCAL_RESOURCES not in uses:
        return A5_LINK.failure(f"{RESOURCE_CONFIG} alone", "UB", f"export {LOCAL_RESOURCES}='{UB}'")
    text = need.env.get(LOCAL_RESOURCES)
    try:
        read_json(text or "{}", LOCAL_RESOURCES)
    except JsonError:
        return A5_LINK.failure(f"{LOCAL_RESOURCES}={text} is no JSON object", UB, f"export {LOCAL_RESOURCES}='{UB}'")
    return A5_LINK.ok(" and ".join(uses))


def _resources(need: Need) -> Finding:
    try:
        reading = read_resources(need.env)
    except OptionError as error:
        return RESOURCES.failure(str(error), "a JSON object", "correct it; docs/configuration.md has its known fields")
    if reading.warnings:
        return RESOURCES.warning("; ".join(reading.warnings), "known fields", "correct the name of the field")
    return RESOURCES.ok(f"{RESOURCE_CONFIG} {'is sound' if need.env.get(RESOURCE_CONFIG) else 'is unset'}")


def _toolkit(need: Need) -> Finding:
    home = need.env.get("ASCEND_HOME_PATH") or need.env.get("ASCEND_TOOLKIT_HOME")
    if home:
        return TOOLKIT.ok(home)
    fix = "source /usr/local/Ascend/ascend-toolkit/set_env.sh and /usr/local/Ascend/nnal/atb/set_env.sh"
    return TOOLKIT.failure("ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are unset", "the toolkit's folder", fix)


def _devices(files: Files, need: Need) -> list[Finding]:
    value = need.env.get("ASCEND_RT_VISIBLE_DEVICES", "")
    if not value:
        return []
    parts = [part.strip() for part in value.split(",")]
    here = ", ".join(map(str, files.npus)) or "none"
    wrong = [part for part in parts if not part.isdigit() or int(part) >= len(files.npus)]
    shown = f"ASCEND_RT_VISIBLE_DEVICES={value}"
    if not files.dev:
        return [DEVICES.unknown(shown, "NPUs of this host", "compare with `npu-smi info`")]
    if wrong:
        fix = "correct it: numbers from 0 on, one for each NPU of the host or container"
        return [DEVICES.failure(f"{shown}: no NPU {', '.join(wrong)}", f"NPUs of this host ({here})", fix)]
    return [DEVICES.ok(shown)]


def _libraries(need: Need) -> list[Finding]:
    folder = {"mooncake": "mooncake", "memcache": "memcache_hybrid/lib"}.get(need.backend)
    if folder is None:
        return []
    value = need.env.get("LD_LIBRARY_PATH", "")
    if any(part.rstrip("/").endswith(folder) for part in value.split(":")):
        return [LIBRARIES.ok(f"a folder …/{folder}")]
    fix = f"export LD_LIBRARY_PATH=<site-packages>/{folder}:$LD_LIBRARY_PATH"
    return [LIBRARIES.warning("LD_LIBRARY_PATH has no such folder", f"…/{folder}", fix)]
