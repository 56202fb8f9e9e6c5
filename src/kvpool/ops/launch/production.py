"""The files of a deployment on production hosts: as the deployment guides have them, and right where the guides' samples are not.

What is different from the samples, and why: docs/up.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvpool.ops.launch import transfer_config
from kvpool.ops.launch.options import Mode
from kvpool.ops.launch.plan import SERVER
from kvpool.ops.launch.pool_files import FOLDER, File, PoolOnHost, script
from kvpool.ops.launch.series import GIB, Series
from kvpool.ops.launch.shell import command_lines, exports
from kvpool.options.ascend_store import BackendName
from kvpool.options.errors import OptionError

ENGINE_PORT, PREFILL_PORT, DECODE_PORT, PROXY_PORT = 8100, 8100, 8200, 8000
KV_PORTS = {"prefill": 20001, "decode": 20002}
PAGE = 2 << 20
LOGS = "/var/log/kvpool"
ORDER_OF_SERVICES = ("run_master.sh", "run_meta_service.sh", "run_owner.sh", "run_local_service.sh", "run_worker.sh")


@dataclass(frozen=True, slots=True)
class Production:
    """Addresses are those under which other hosts reach a host; ``dram``: bytes of the pool that each host gives."""

    mode: Mode
    series: Series
    backend: BackendName
    model: str
    name: str
    tp: int
    dram: int
    service_host: str
    prefill_host: str
    decode_host: str
    nic: str
    engine_args: tuple[str, ...] = ()

    @property
    def pool(self) -> PoolOnHost:
        separated = self.mode == "separated"
        return PoolOnHost(self.backend, self.series, self.service_host, self.dram, self.tp, separated)

    @property
    def requests_to(self) -> tuple[str, int]:
        return self.prefill_host, PROXY_PORT if self.mode == "pd" else ENGINE_PORT


def production_files(chosen: Production) -> list[File]:
    """In the order in which they are used. OptionError where the sizes do not fit."""
    _check(chosen)
    files = [_prepare(chosen)] if chosen.series.wants_huge_pages else []
    files += chosen.pool.files()
    if chosen.mode == "pd":
        files += [_engine(chosen, "prefill"), _engine(chosen, "decode"), _proxy(chosen)]
    else:
        files.append(_engine(chosen, "engine"))
    files.append(_requests(chosen))
    return [File("README.txt", _order(chosen, files)), *files]


def _check(chosen: Production) -> None:
    if chosen.mode != "separated" and chosen.backend in ("mooncake", "memcache") and chosen.pool.per_rank == 0:
        raise OptionError("--dram", chosen.dram, f"is less than 1GB for each of {chosen.tp} ranks, and NPUs map memory by whole GB")
    if chosen.mode == "separated" and chosen.series.npu and chosen.dram % GIB:
        raise OptionError("--dram", chosen.dram, "is not a multiple of 1GB, in which NPUs map memory")


def _engine(chosen: Production, side: str) -> File:
    """``side``: prefill, decode, or engine where there is one kind only."""
    host, port = _where(chosen, side)
    series = chosen.series
    body = ""
    if series.npu:
        body += "source /usr/local/Ascend/ascend-toolkit/set_env.sh\nsource /usr/local/Ascend/nnal/atb/set_env.sh\n\n"
    env = {"PYTHONHASHSEED": "0", "VLLM_HOST_IP": host, **series.variables(host, chosen.nic), **chosen.pool.variables}
    if series.visible:
        env[series.visible] = ",".join(map(str, range(chosen.tp)))
    if series.npu:
        env["ASCEND_PROCESS_LOG_PATH"] = f"{LOGS}/{side}/ascend"  # of its own: engines of a host must not share one
    body += exports(env)
    package = {"mooncake": "mooncake", "memcache": "memcache_hybrid"}.get(chosen.backend)
    if package and series.npu:
        body += _library_path(package)
    if chosen.mode == "pd":
        body += ': "${KVPOOL_SECRET:?set it, and export it: one secret of 16 characters or more on prefill, decode and proxy}"\n'
    body += f'mkdir -p {LOGS}/{side}\nlog={LOGS}/{side}/$(date +%Y%m%d-%H%M%S).log\necho "log: $log"\n\n'
    body += "exec " + command_lines(_engine_command(chosen, side, port)).rstrip("\n") + ' \\\n    >> "$log" 2>&1\n'
    where = f"on {host}" if chosen.mode == "pd" else f"on {host}; for a further host write its address instead"
    return File(f"run_{side}.sh", script(f"{side.capitalize()}: {where}.", body))


def _library_path(package: str) -> str:
    """Where the package lies is asked, not guessed: it depends on the Python."""
    found = f"import importlib.util; print(importlib.util.find_spec('{package}').submodule_search_locations[0])"
    return f'package=$(python -c "{found}")\nexport LD_LIBRARY_PATH="$package:$package/lib:$LD_LIBRARY_PATH"\n'


def _engine_command(chosen: Production, side: str, port: int) -> list[str]:
    command = ["python", "-m", SERVER, "--model", chosen.model, "--served-model-name", chosen.name]
    command += ["--host", _where(chosen, side)[0], "--port", str(port), "--tensor-parallel-size", str(chosen.tp)]
    command += ["--max-num-seqs", "20", "--max-model-len", "32768", "--max-num-batched-tokens", "16384"]
    if chosen.series.npu:
        command.append("--enforce-eager")
    if chosen.series.name != "cpu":
        command += ["--gpu-memory-utilization", "0.9"]
    return [*command, "--kv-transfer-config", json.dumps(_transfer(chosen, side)), *chosen.engine_args]


def _transfer(chosen: Production, side: str) -> dict[str, Any]:
    pool: dict[str, Any] = {"backend": chosen.backend}
    if chosen.backend == "local":
        pool |= {"local_pool_name": "main", "local_dram_size": chosen.dram}
    if chosen.mode != "pd":
        return transfer_config.alone({**pool, "lookup_rpc_port": "0"})
    role: transfer_config.Role = "kv_producer" if side == "prefill" else "kv_consumer"
    label = "0" if side == "prefill" else "1"
    return transfer_config.paired(role, KV_PORTS[side], chosen.tp, {**pool, "lookup_rpc_port": label}, {})


def _where(chosen: Production, side: str) -> tuple[str, int]:
    places = {"prefill": (chosen.prefill_host, PREFILL_PORT), "decode": (chosen.decode_host, DECODE_PORT)}
    return places.get(side, (chosen.prefill_host, ENGINE_PORT))


def _proxy(chosen: Production) -> File:
    command = ["kvpool", "proxy", "--host", chosen.prefill_host, "--port", str(PROXY_PORT)]
    command += ["--prefiller-hosts", chosen.prefill_host, "--prefiller-ports", str(PREFILL_PORT)]
    command += ["--decoder-hosts", chosen.decode_host, "--decoder-ports", str(DECODE_PORT)]
    body = ': "${KVPOOL_SECRET:?set it, and export it: that of the engines}"\nexec ' + command_lines(command)
    return File("run_proxy.sh", script(f"The proxy: on {chosen.prefill_host}, any time.", body))


def _requests(chosen: Production) -> File:
    """The port that is served, the name that is served, and the option that this endpoint knows."""
    host, port = chosen.requests_to
    question = {"model": chosen.name, "prompt": "The three largest lakes of Europe are", "max_tokens": 64, "temperature": 0.0}
    command = ["curl", f"http://{host}:{port}/v1/completions", "-sS", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(question)]
    return File("ask.sh", script("A request.", command_lines(command)))


def _prepare(chosen: Production) -> File:
    """Pages for the pool only, added to what is there, and looked at afterwards."""
    pages = -(-chosen.dram // PAGE)
    body = f"""pages={pages}  # of 2 MiB: the {chosen.dram >> 20} MB that this host gives to the pool
[ "$(awk '/^Hugepagesize:/ {{print $2}}' /proc/meminfo)" = 2048 ] || {{ echo "huge pages of this host are not of 2 MiB"; exit 1; }}
free=$(awk '/^HugePages_Free:/ {{print $2}}' /proc/meminfo)
total=$(awk '/^HugePages_Total:/ {{print $2}}' /proc/meminfo)
missing=$((pages - free))
if [ "$missing" -gt 0 ]; then
    available=$(awk '/^MemAvailable:/ {{print $2}}' /proc/meminfo)
    [ $((missing * 2048)) -lt "$available" ] || {{ echo "$missing pages are more than the memory that is available"; exit 1; }}
    sysctl -w vm.nr_hugepages=$((total + missing))
fi
free=$(awk '/^HugePages_Free:/ {{print $2}}' /proc/meminfo)
[ "$free" -ge "$pages" ] || {{ echo "only $free of $pages pages: memory is fragmented, reserve them at boot"; exit 1; }}
echo "$free huge pages are free"
"""
    return File("prepare_host.sh", script("Huge pages: once on every host after a boot, as root, before anything else.", body))


def _order(chosen: Production, files: list[File]) -> str:
    names = [file.name for file in files]
    scripts = [name for name in ("prepare_host.sh", *ORDER_OF_SERVICES) if name in names]
    scripts += [name for name in names if name.startswith("run_") and name not in scripts]
    configs = [name for name in names if not name.endswith(".sh")]
    host, port = chosen.requests_to
    over = f" over {chosen.series.link}" if chosen.series.link else ""
    lines = [f"{chosen.mode} on {chosen.series.name}{over}, store {chosen.backend}", ""]
    if configs:
        lines.append(f"Copy to {FOLDER} on every host: {', '.join(configs)}.")
    lines.append(f"Start in this order: {', '.join(scripts)}.")
    lines.append(f"Requests go to http://{host}:{port}/v1 (ask.sh).")
    lines += ["", *_notes(chosen)]
    return "\n".join(lines) + "\n"


def _notes(chosen: Production) -> list[str]:
    notes = ["Check before starting: `kvpool config check` (docs/up.md says how)."]
    if chosen.series.name != "cpu":
        notes.append("Not run by us on this series. See docs/up.md for what was run.")
    if chosen.series.npu:
        notes.append("Beside vllm_ascend its connectors of these names are used, unless KVPOOL_TAKEOVER=1 is set.")
        if chosen.mode == "pd":
            notes.append("The guides have consumer_is_to_put for MLA models only: with vllm_ascend, remove it for others.")
    if "192.0.2." in "".join((chosen.service_host, chosen.prefill_host, chosen.decode_host)):
        notes.append("192.0.2.x are no real addresses: give --service-host, --prefill-host and --decode-host.")
    if chosen.mode == "separated" and chosen.backend == "memcache" and chosen.series.link != "hccs":
        notes.append("The guides have the separated deployment of MemCache for A3 over HCCS only.")
    if chosen.backend == "memcache" and chosen.series.memcache_protocol == "host_shm":
        notes.append("host_shm works within one host; for several set host_tcp or host_rdma in the conf files.")
    if chosen.backend == "mooncake":
        notes.append("Mooncake's data ports listen on all interfaces without a password: keep these hosts in their own network.")
    if chosen.backend == "local" and chosen.mode == "pd":
        notes.append("The local store is shared within one host: prefill and decode run on the same one.")
        notes.append("Give each side its own cores: VLLM_CPU_OMP_THREADS_BIND, as 0-31 and 32-63.")
    return notes
