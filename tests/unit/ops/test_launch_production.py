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
from kvpool.ops.launch.production import Production, production_files
from kvpool.ops.launch.series import LINKS, series_of
from kvpool.options import OptionError
from kvpool.options.check import check

STUB = '#!/bin/bash\nprintf "%s\\0" "$@" > "$CAPTURE/arguments"\nenv -0 > "$CAPTURE/environment"\n'
GIB = 1 << 30
CASES = [
    (mode, series, link, backend)
    for mode in ("mixed", "pd", "separated")
    for series, links in LINKS.items()
    for link in (links or (None,))
    for backend in ("local", "mooncake", "memcache", "yuanrong")
    if backend != "local" or (series == "cpu" and mode != "separated")
]
SAMPLE = [case for case in CASES if case[3] in ("local", "mooncake", "memcache")]


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


def run(text, folder):
    """The script with stubs for what it starts: the arguments and the environment of the last one."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("python", "kvpool", "curl"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    text = text.replace("/var/log/kvpool", str(folder / "log")).replace("/usr/local/Ascend", str(folder / "ascend"))
    for name in ("ascend-toolkit", "nnal/atb"):
        (folder / "ascend" / name).mkdir(parents=True, exist_ok=True)
        (folder / "ascend" / name / "set_env.sh").touch()
    env = {"PATH": f"{stubs}:{os.defpath}", "CAPTURE": str(folder), "KVPOOL_SECRET": "0123456789abcdef"}
    subprocess.run([shutil.which("bash"), "-c", text], env=env, check=True, capture_output=True, timeout=30)
    words = (folder / "arguments").read_text().split("\0")
    pairs = (folder / "environment").read_text().split("\0")
    return words, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def service_commands(made):
    text = made.get("run_master.sh", "").replace("\\\n", " ")
    return [line.removeprefix("exec ") for line in text.splitlines() if "mooncake_master" in line]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_configurations_are_accepted_by_the_check_without_a_warning(case, tmp_path):
    made = files(*case)
    series = case[1]
    device = series if series in ("cpu", "cuda") else "npu"
    for name in ("run_prefill.sh", "run_decode.sh") if case[0] == "pd" else ("run_engine.sh",):
        words, env = run(made[name], tmp_path)
        for variable in ("MOONCAKE_CONFIG_PATH", "MMC_LOCAL_CONFIG_PATH"):
            if variable in env:
                config = env[variable].rpartition("/")[2]
                (tmp_path / config).write_text(made[config])
                env[variable] = str(tmp_path / config)
        meta = None
        if "mmc-meta.conf" in made:
            meta = str(tmp_path / "mmc-meta.conf")
            (tmp_path / "mmc-meta.conf").write_text(made["mmc-meta.conf"])
            env["MEMFABRIC_HYBRID_EXTEND_LIB_PATH"] = str(tmp_path)
        hardware = series.upper() if device == "npu" else None
        deployment = on(tp=2, dp=1, pp=1, device=device, hardware=hardware, hosts=1 if "host_shm" in str(made) else 2)
        if case[3] == "local":
            deployment = on(tp=2, dp=1, pp=1, device="cpu")
        transfer = words[words.index("--kv-transfer-config") + 1]
        found = check(transfer, [], env, deployment=deployment, meta=meta, services=service_commands(made), proxy_port=8000)
        assert found.warnings == []


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
    assert f"pages={8 * GIB >> 21} " in files("mixed", "a2")["prepare_host.sh"]
    assert f"pages={8 * GIB >> 21} " in files("mixed", "a3", "roce")["prepare_host.sh"]
    for case in (("mixed", "a3", "hccs"), ("mixed", "a5"), ("mixed", "cuda"), ("mixed", "cpu", None, "local")):
        assert "prepare_host.sh" not in files(*case)


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
    text = files("mixed", "a2")["prepare_host.sh"].replace("/proc/meminfo", str(info))
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
    made = files("separated", "a3", "hccs", "mooncake")
    assert json.loads(made["mooncake.json"])["global_segment_size"] == 0
    assert json.loads(made["owner.json"])["global_segment_size"] == 8 * GIB
    assert json.loads(files("mixed")["mooncake.json"])["global_segment_size"] == 4 * GIB, "per rank"


def test_sizes_that_do_not_fit():
    with pytest.raises(OptionError, match="less than 1GB for each of 2 ranks"):
        files("mixed", dram=1 * GIB)
    with pytest.raises(OptionError, match="not a multiple of 1GB"):
        files("separated", dram=(3 * GIB) // 2)


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
         "mooncake, memcache, yuanrong"),
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
