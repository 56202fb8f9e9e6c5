"""The files of a deployment on production hosts: as the deployment guides have them, and right where the guides' samples are not.

What is different from the samples, and why: docs/up.md.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvpool.devices import device_of
from kvpool.ops.launch import transfer_config
from kvpool.ops.launch.npu_setup import libraries, toolkit
from kvpool.ops.launch.options import Mode
from kvpool.ops.launch.plan import SERVER
from kvpool.ops.launch.pool_files import FOLDER, File, PoolOnHost, script
from kvpool.ops.launch.series import GIB, Series
from kvpool.ops.launch.shell import command_lines, exports
from kvpool.options.amounts import huge_pages
from kvpool.options.ascend_store import BackendName
from kvpool.options.errors import OptionError

ENGINE_PORT, PREFILL_PORT, DECODE_PORT, PROXY_PORT = 8100, 8100, 8200, 8000
KV_PORT = 20001
LOGS = "/var/log/kvpool"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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
        ranks = self.tp * (2 if self.shares_host else 1)
        separated = self.mode == "separated"
        return PoolOnHost(self.backend, self.series, self.service_host, self.prefill_host, self.nic, self.dram, ranks, separated)

    @property
    def shares_host(self) -> bool:
        """Whether prefill and decode run on the same host, and so divide its devices and what it gives to the pool."""
        return self.mode == "pd" and self.prefill_host == self.decode_host

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
    for flag, value in (
        ("--service-host", chosen.service_host),
        ("--prefill-host", chosen.prefill_host),
        ("--decode-host", chosen.decode_host),
        ("--nic", chosen.nic),
    ):
        if not _NAME.fullmatch(value):
            raise OptionError(flag, value, "expected a name or an IPv4 address, without a port")
    if chosen.backend == "local" and chosen.mode == "pd" and not chosen.shares_host:
        raise OptionError("--decode-host", chosen.decode_host, "the local store is shared within one host: give that of prefill")
    ranks = 1 if chosen.mode == "separated" else chosen.pool.ranks
    if chosen.series.npu and chosen.backend in ("mooncake", "memcache") and chosen.dram % (ranks * GIB):
        share = f"1GB for each of {ranks} ranks" if ranks > 1 else "1GB"
        reason = f"is not a multiple of {share}, in which NPUs map memory: give {-(-chosen.dram // (ranks * GIB)) * ranks}GB"
        raise OptionError("--dram", chosen.dram, reason)


def _engine(chosen: Production, side: str) -> File:
    """``side``: prefill, decode, or engine where there is one kind only."""
    host, port = _where(chosen, side)
    series = chosen.series
    body = toolkit(series)
    env = {"PYTHONHASHSEED": "0", "VLLM_HOST_IP": host, **series.variables(host, chosen.nic), **chosen.pool.variables}
    if series.visible:
        first = chosen.tp if chosen.shares_host and side == "decode" else 0
        env[series.visible] = ",".join(map(str, range(first, first + chosen.tp)))
    if series.npu:
        env["ASCEND_PROCESS_LOG_PATH"] = f"{LOGS}/{side}/ascend"  # of its own: engines of a host must not share one
    body += exports(env)
    body += libraries(series, chosen.backend)
    if chosen.backend == "yuanrong":
        body += 'mkdir -p "$DATASYSTEM_CLIENT_LOG_DIR"\n'
    if chosen.mode == "pd":
        body += ': "${KVPOOL_SECRET:?set it, and export it: one secret of 16 characters or more on prefill, decode and proxy}"\n'
    body += f'mkdir -p {LOGS}/{side}\nlog={LOGS}/{side}/$(date +%Y%m%d-%H%M%S).log\necho "log: $log"\n\n'
    body += "exec " + command_lines(_engine_command(chosen, side, port)).rstrip("\n") + ' \\\n    >> "$log" 2>&1\n'
    where = f"on {host}" if chosen.mode == "pd" else f"on {host}; for a further host write its address instead"
    return File(f"run_{side}.sh", script(f"{side.capitalize()}: {where}.", body))


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
    kv_port = KV_PORT if side == "prefill" else KV_PORT + chosen.tp  # some connectors take one for each rank
    return transfer_config.paired(role, kv_port, chosen.tp, {**pool, "lookup_rpc_port": label}, {})


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
    command = ["curl", f"http://{host}:{port}/v1/completions", "-sS", "--max-time", "600", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(question)]
    return File("ask.sh", script("A request.", command_lines(command)))


def _prepare(chosen: Production) -> File:
    """Pages for the pool only, added to what is there, and looked at afterwards."""
    nbytes = chosen.pool.host_nbytes
    pages = huge_pages(nbytes)
    body = f"""pages={pages}  # of 2 MiB: the {nbytes >> 20} MB that the pool takes of this host
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
    notes += _notes_on_device(chosen.series)
    if chosen.series.npu and chosen.mode == "pd":
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


def _notes_on_device(series: Series) -> list[str]:
    """Whose connectors run there, as far as this version has none for the device."""
    try:
        device_of("npu" if series.npu else series.name)
    except ValueError:
        if series.npu:
            return ["The connectors must be vllm_ascend's (leave KVPOOL_TAKEOVER unset): this version of kvpool runs on CPUs only."]
        return [f"This version of kvpool runs on CPUs only: engines on {series.name} will refuse to start with these files."]
    return ["Beside vllm_ascend its connectors of these names are used, unless KVPOOL_TAKEOVER=1 is set."] if series.npu else []
