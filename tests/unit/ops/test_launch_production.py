"""Files for production hosts: scripts that a shell takes, configurations that the checks accept without a word, and none of the
mistakes of the guides' samples."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
from tests.unit.options.mistake_cases import on
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.doctor.choosing import Asked, choose
from kvpool.ops.doctor.need import page_needs
from kvpool.ops.launch.production import Production, production_files
from kvpool.ops.launch.series import LINKS, series_backend, series_of
from kvpool.options import OptionError
from kvpool.options.check import check
from kvpool.options.probe import Probe

STUB = """#!/bin/bash
case "$2" in *find_spec*)
    package=${2#*(\\'}; package=$CAPTURE/site/${package%%\\'*}
    mkdir -p "$package/lib"; echo "$package"; exit;;
esac
printf "%s\\0" "$@" > "$CAPTURE/arguments"
env -0 > "$CAPTURE/environment"
"""
GIB = 1 << 30
NPUS = ("a2", "a3", "a5")


def works(mode, series, link, backend):
    """Whether the command takes this store there."""
    try:
        return series_backend(backend, series_of(series, link), mode == "separated") == backend
    except OptionError:
        return False


CASES = [
    (mode, series, link, backend)
    for mode in ("mixed", "pd", "separated")
    for series, links in LINKS.items()
    for link in (links or (None,))
    for backend in ("local", "mooncake", "memcache", "yuanrong")
    if works(mode, series, link, backend)
]


def test_stores_that_cannot_work_are_refused_and_the_usual_one_works():
    refused = [
        ("mixed", "a2", None, "local"),
        ("separated", "cpu", None, "local"),
        ("mixed", "cuda", None, "memcache"),
        ("separated", "a3", "hccs", "mooncake"),
    ]
    for case in refused:
        assert case not in CASES
    for mode, series, link, _ in CASES:
        usual = series_backend(None, series_of(series, link), mode == "separated")
        assert (mode, series, link, usual) in CASES
    assert series_backend(None, series_of("a3", "hccs"), True) == "memcache", "as the guide has it"


def production(mode="pd", series="a2", link=None, backend="mooncake", **more):
    hosts = dict.fromkeys(("service_host", "prefill_host", "decode_host"), "192.0.2.1")
    given = {"model": "Q/Qwen3-32B", "name": "Qwen3-32B", "tp": 2, "dram": 8 * GIB, "nic": "eth0", **hosts, **more}
    return Production(mode, series_of(series, link), backend, **given)


def files(*case, **more):
    return {file.name: file.text for file in production_files(production(*case, **more))}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scripts_are_scripts(case):
    made = files(*case)
    for name, text in made.items():
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        assert "rm -rf" not in text, "the logs of others"
        assert not re.search(r"> */proc/sys/vm", text)
    started = re.findall(r"[\w.]+\.sh", next(line for line in made["README.txt"].splitlines() if line.startswith("Start")))
    assert set(started) == {name for name in made if name.endswith(".sh")} - {"ask.sh"}


def run(text, folder, **more):
    """The script with stubs for what it starts: the arguments and the environment of the last one."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("python", "kvpool", "curl", "dscli"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    for there in ("/var/log", "/usr/local/Ascend", "/etc/kvpool", "/run/kvpool"):
        text = text.replace(there, f"{folder}{there}")
    for name in ("ascend-toolkit", "nnal/atb"):
        place = folder / "usr/local/Ascend" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "set_env.sh").write_text(f"export SOURCED_{name[:4]}=1\nfalse\n")  # its tests may fail
    env = {"PATH": f"{stubs}:{os.defpath}", "CAPTURE": str(folder), "KVPOOL_SECRET": "0123456789abcdef", **more}
    subprocess.run([shutil.which("bash"), "-c", text], env=env, check=True, capture_output=True, timeout=60)
    words = (folder / "arguments").read_text().split("\0")
    pairs = (folder / "environment").read_text().split("\0")
    return words[:-1], dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def service_commands(made, folder):
    """What starts mooncake_master or a worker of Yuanrong, whose script also writes the client's file."""
    master = made.get("run_master.sh", "").replace("\\\n", " ")
    found = [line.removeprefix("exec ") for line in master.splitlines() if "mooncake_master" in line]
    if "run_worker.sh" in made:
        words, _ = run(made["run_worker.sh"], folder, HOST_IP="192.0.2.1")
        found.append(shlex.join(["dscli", *words]))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_configurations_are_accepted_by_the_check_without_a_warning(case, tmp_path):
    made = files(*case)
    series, configs = case[1], tmp_path / "etc" / "kvpool"
    device = "npu" if series in NPUS else series
    configs.mkdir(parents=True)
    for name, text in made.items():
        (configs / name).write_text(text)
    services = service_commands(made, tmp_path)
    meta = str(configs / "mmc-meta.conf") if case[3] == "memcache" else None
    hardware = series.upper() if device == "npu" else None
    hosts = 1 if "host_shm" in str(made) or case[3] == "local" else 2
    deployment = on(tp=2, dp=1, pp=1, device=device, hardware=hardware, hosts=hosts)
    for name in ("run_prefill.sh", "run_decode.sh") if case[0] == "pd" else ("run_engine.sh",):
        words, env = run(made[name], tmp_path)
        assert (device == "npu") == ("SOURCED_asce" in env) == ("SOURCED_nnal" in env)
        transfer = words[words.index("--kv-transfer-config") + 1]
        found = check(transfer, [], env, deployment=deployment, meta=meta, services=services, proxy_port=8000)
        assert found.warnings == []


@pytest.mark.parametrize(("link", "variable"), [("hccs", "ASCEND_ENABLE_USE_FABRIC_MEM"), ("roce", "HCCL_INTRA_ROCE_ENABLE")])
def test_the_owner_of_memory_has_the_variables_and_libraries_of_an_engine(link, variable, tmp_path):
    made = files("separated", "a3", link, "memcache")
    engine, owner, meta = (run(made[f"run_{name}.sh"], tmp_path)[1] for name in ("engine", "local_service", "meta_service"))
    for name in ("SOURCED_asce", "LD_LIBRARY_PATH", "MEMFABRIC_HYBRID_EXTEND_LIB_PATH"):
        assert engine[name] == owner[name] == meta[name]
    assert engine[variable] == owner[variable] == "1"
    assert engine["LD_LIBRARY_PATH"].split(":") == [f"{tmp_path}/site/memcache_hybrid", f"{tmp_path}/site/memcache_hybrid/lib"]
    kept, _ = run(made["run_engine.sh"], tmp_path, LD_LIBRARY_PATH="/opt/lib")[1], None
    assert kept["LD_LIBRARY_PATH"].endswith("/lib:/opt/lib")


def test_a_toolkit_that_is_not_there_ends_the_script():
    text = files("mixed", "a2")["run_engine.sh"]
    done = subprocess.run(["bash", "-c", text.replace("/usr/local/Ascend", "/nowhere")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "/nowhere/ascend-toolkit/set_env.sh is not there: install CANN\n"


def test_two_engines_of_one_host_divide_its_devices_memory_and_ports(tmp_path):
    for decode_host, devices, given in (("192.0.2.1", "2,3", 2), ("192.0.2.9", "0,1", 4)):
        made = files("pd", "a3", "hccs", "mooncake", decode_host=decode_host)
        found = {}
        for side in ("prefill", "decode"):
            words, env = run(made[f"run_{side}.sh"], tmp_path)
            pull = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]["connectors"][0]
            found[side] = (env["ASCEND_RT_VISIBLE_DEVICES"], pull["kv_port"])
        assert found == {"prefill": ("0,1", "20001"), "decode": (devices, "20003")}
        assert json.loads(made["mooncake.json"])["global_segment_size"] == given * GIB


def test_what_this_version_cannot_run_is_said():
    assert "runs on CPUs only: engines on cuda will refuse to start" in files("mixed", "cuda")["README.txt"]
    assert "leave KVPOOL_TAKEOVER unset" in files("mixed", "a2")["README.txt"]
    assert "CPUs only" not in files("mixed", "cpu")["README.txt"]


@pytest.mark.parametrize("mode", ["mixed", "pd", "separated"])
def test_the_request_goes_where_something_listens_with_the_name_it_has(mode, tmp_path):
    made = files(mode)
    words, _ = run(made["ask.sh"], tmp_path)
    url, body = words[0], json.loads(words[words.index("-d") + 1])
    assert body["max_tokens"] == 64
    assert "max_completion_tokens" not in body, "of chats only"
    server = made["run_proxy.sh" if mode == "pd" else "run_engine.sh"]
    arguments, _ = run(server, tmp_path)
    host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
    assert url == f"http://{host}:{port}/v1/completions"
    engine, _ = run(made["run_prefill.sh" if mode == "pd" else "run_engine.sh"], tmp_path)
    assert engine[engine.index("--served-model-name") + 1] == body["model"]


def test_the_proxy_is_told_the_ports_of_the_engines(tmp_path):
    made = files()
    arguments, _ = run(made["run_proxy.sh"], tmp_path)
    for side, flag in (("prefill", "--prefiller-ports"), ("decode", "--decoder-ports")):
        engine, _ = run(made[f"run_{side}.sh"], tmp_path)
        assert arguments[arguments.index(flag) + 1] == engine[engine.index("--port") + 1]


def test_huge_pages_are_those_of_the_pool_and_only_where_they_are_needed():
    assert f"pages={8 * GIB >> 21} " in files("mixed", "a2", None, "memcache")["prepare_host.sh"]
    assert f"pages={10 * GIB >> 21} " in files("mixed", "a3", "roce")["prepare_host.sh"], "and a buffer of 1 GB for each rank"
    for case in (("mixed", "a3", "hccs"), ("mixed", "a5"), ("mixed", "cuda"), ("mixed", "cpu", None, "local")):
        assert "prepare_host.sh" not in files(*case)


@pytest.mark.parametrize("backend", ["mooncake", "memcache"])
def test_doctor_wants_the_huge_pages_that_are_reserved(backend, tmp_path):
    made = files("pd", "a2", None, backend)
    name, variable = {
        "mooncake": ("mooncake.json", "MOONCAKE_CONFIG_PATH"),
        "memcache": ("mmc-local.conf", "MMC_LOCAL_CONFIG_PATH"),
    }[backend]
    (tmp_path / name).write_text(made[name])
    need, _ = choose(Asked(series="a2", backend=backend, ranks=4), {variable: str(tmp_path / name)}, Probe(str(tmp_path)))
    (wanted,) = page_needs(need)
    assert f"pages={wanted.number} " in made["prepare_host.sh"]


@pytest.mark.parametrize(
    ("total", "free", "available_kb", "code", "told"),
    [
        (0, 0, 64 << 20, 0, "vm.nr_hugepages=4096"),
        (5000, 1000, 64 << 20, 0, "vm.nr_hugepages=8096"),  # what others use stays theirs
        (4096, 4096, 0, 0, ""),
        (0, 0, 1 << 20, 1, "more than the memory that is available"),
    ],
)
def test_huge_pages_are_added_to_what_is_there(total, free, available_kb, code, told, tmp_path):
    info = tmp_path / "meminfo"

    def meminfo(total, free):
        lines = {"MemAvailable": f"{available_kb} kB", "HugePages_Total": total, "HugePages_Free": free, "Hugepagesize": "2048 kB"}
        return "".join(f"{key}:       {value}\n" for key, value in lines.items())

    info.write_text(meminfo(total, free))
    (tmp_path / "after").write_text(meminfo(9000, 4096))
    (tmp_path / "sysctl").write_text(f'#!/bin/bash\necho "$@"\ncp {tmp_path}/after {info}\n')
    (tmp_path / "sysctl").chmod(0o755)
    text = files("mixed", "a2", None, "memcache")["prepare_host.sh"].replace("/proc/meminfo", str(info))
    done = subprocess.run(["bash", "-c", text], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert done.returncode == code, done
    assert told in done.stdout


def test_a5_gets_one_of_its_two_variables(tmp_path):
    for link, there, missing in (
        ("ub", "ASCEND_LOCAL_COMM_RES", "ASCEND_GLOBAL_RESOURCE_CONFIG"),
        ("uboe", "ASCEND_GLOBAL_RESOURCE_CONFIG", "ASCEND_LOCAL_COMM_RES"),
    ):
        _, env = run(files("mixed", "a5", link)["run_engine.sh"], tmp_path)
        json.loads(env[there])
        assert missing not in env


def test_the_owner_gives_all_and_engines_nothing():
    made = files("separated", "a3", "hccs", "memcache")
    assert "dram.size = 0GB" in made["mmc-local.conf"]
    assert (
        made["mmc-local.conf"].count("max.dram.size = 8GB") == made["mmc-local-standalone.conf"].count("max.dram.size = 8GB") == 1
    )
    made = files("separated", "cpu", None, "mooncake")
    assert json.loads(made["mooncake.json"])["global_segment_size"] == 0
    assert json.loads(made["owner.json"])["global_segment_size"] == 8 * GIB
    assert json.loads(files("mixed")["mooncake.json"])["global_segment_size"] == 4 * GIB, "per rank"


def test_sizes_that_do_not_fit():
    with pytest.raises(OptionError, match="not a multiple of 1GB for each of 2 ranks, in which NPUs map memory: give 2GB"):
        files("mixed", dram=1 * GIB)
    with pytest.raises(OptionError, match=r"not a multiple of 1GB for each of 2 ranks, .* give 6GB"):
        files("mixed", dram=5 * GIB)  # 1 GB of it would not be used
    with pytest.raises(OptionError, match=r"not a multiple of 1GB, .* give 2GB"):
        files("separated", "a3", "hccs", "memcache", dram=(3 * GIB) // 2)
    assert json.loads(files("mixed", "cpu", dram=5 * GIB)["mooncake.json"])["global_segment_size"] == 5 * GIB // 2


@pytest.mark.parametrize("value", ["192.0.2.1:5000", "a b", "$(reboot)", "fe80::1", ""])
def test_addresses_are_addresses(value):
    for name in ("service_host", "prefill_host", "decode_host", "nic"):
        with pytest.raises(OptionError, match="^--" + name.replace("_", "-")):
            files("pd", **{name: value})


def told(*arguments):
    result = CliRunner().invoke(app, ["up", *arguments])
    return result.exit_code, result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("combined --model m", 'error: MODE="combined": accepted: mixed, pd, separated'),
        ("pd --model m --series a9", 'error: --series="a9": accepted: a2, a3, a5, cuda, cpu'),
        ("pd --model m --series a2 --link hccs", 'error: --link="hccs": accepted with --series a2: roce'),
        ("pd --model m --series a2 --port 80", "error: --port is of use not with --series"),
        ("pd --model m --link roce", "error: --link is of use only with --series"),
        ("pd --model m --series cuda --backend local", "error: --backend=\"local\": does not reach the memory of cuda; accepted: "
         "mooncake"),
        ("pd --model m --series cuda --backend memcache", "error: --backend=\"memcache\": does not reach the memory of cuda; "
         "accepted: mooncake"),
        ("pd --model m --series cuda --backend yuanrong", "error: --backend=\"yuanrong\": does not reach the memory of cuda; "
         "accepted: mooncake"),
        ("separated --model m --series a3 --backend mooncake", "error: --backend=\"mooncake\": has no owner that maps memory for "
         "NPUs; accepted: memcache, yuanrong"),
        ("pd --model m --series cpu --decode-host 192.0.2.9", "error: --decode-host=\"192.0.2.9\": the local store is shared "
         "within one host: give that of prefill"),
        ("pd --model m --series cpu --service-host b", "error: --service-host is of no use with the local store, which has no "
         "service"),
        ("mixed --model m --series a2 --decode-host b", "error: --decode-host is of use only in mode pd"),
        ("mixed --model m --series a2 --timeout 600", "error: --timeout is of use not with --series"),
        ("mixed --model m --series a2 --host 0.0.0.0", "error: --host is of use not with --series"),
        ("mixed --model m --dram lots", "error: --dram 'lots': expected a size such as 1GB"),
        ("mixed --model m -- --port=3", 'error: --port="--port=3": is set by the launch: use --port before --'),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, line):
    assert told(*shlex.split(arguments)) == (2, line)


def test_files_are_written(tmp_path):
    code, output = told("pd", "--model", "Q/Qwen3-32B", "--series", "a2", "--write", str(tmp_path))
    assert code == 0, output
    assert sorted(output.split()) == sorted(str(path) for path in tmp_path.iterdir())
    assert os.access(tmp_path / "run_prefill.sh", os.X_OK)
    assert not os.access(tmp_path / "mooncake.json", os.X_OK)


def test_a_dry_run_shows_commands_that_a_shell_takes():
    code, output = told("pd", "--model", "m", "--dry-run", "--device", "cpu", "--port", "18000")
    assert code == 0, output
    subprocess.run(["bash", "-n"], input=output, text=True, check=True)
    assert output.count("\nexec ") == 3
    assert "# requests: http://127.0.0.1:18000/v1, model m" in output
