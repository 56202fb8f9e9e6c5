"""The command as an operator meets it: tables, JSON, exit status; on this machine and on one that has nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.doctor import good
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.doctor import Asked, Host, Level, examine
from kvpool.ops.doctor.catalogue import CATALOGUE
from kvpool.ops.doctor.document import document
from kvpool.ops.doctor.examine import without_repeats
from kvpool.ops.doctor.rules.configuration import SOUND
from kvpool.ops.doctor.rules.environment import ROCE, SEED

ROOT = Path(__file__).parents[3]
POOL = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"backend": "local", "local_dram_size": "64MB"},
}


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MOONCAKE_", "MMC_", "YR_", "DS_", "ASCEND_", "HCCL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def doctor(*arguments, measure="--no-measure"):
    return CliRunner().invoke(app, ["doctor", measure, *arguments])


def findings(result):
    return {(one["area"], one["check"]): one for one in json.loads(result.stdout)["findings"]}


def test_json_of_this_host():
    result = doctor("--series", "cpu", "--config", json.dumps(POOL), "--json")
    report = json.loads(result.stdout)
    assert (report["role"], report["series"], report["backend"]) == ("mixed", "cpu", "local")
    found = findings(result)
    assert found["configuration", "options"]["level"] == "ok"
    assert found["memory", "/dev/shm"]["needed"] == "64.0 MiB (local_dram_size)"
    assert sum(report["counts"].values()) == len(report["findings"])
    assert result.exit_code == (1 if report["counts"]["failure"] else 0)


def prefill(**extra):
    sides = {"prefill": {"tp_size": 1, "dp_size": 1}, "decode": {"tp_size": 1, "dp_size": 1}}
    connector = {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": 20001}
    return json.dumps({**connector, "kv_connector_extra_config": {**sides, **extra}})


def test_mistakes_of_a_transfer_fail_and_name_the_fix(monkeypatch):
    monkeypatch.delenv("KVPOOL_SECRET", raising=False)
    monkeypatch.delenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", raising=False)
    wrong = prefill(transfer_host="192.0.2.1", transfer_require_auth=True)  # kept free for documentation
    result = doctor("--series", "cpu", "--config", wrong, "--json")
    found = findings(result)
    assert result.exit_code == 1
    assert found["configuration", "options"]["level"] == "failure"
    assert "transfer_require_auth=true: needs KVPOOL_SECRET" in found["configuration", "options"]["found"]
    assert found["ports", "transfer host"]["level"] == "failure"
    assert "192.0.2.1 (transfer_host): 192.0.2.1 is not of this host" in found["ports", "transfer host"]["found"]
    assert "set transfer_host to one of `ip -br address`" in found["ports", "transfer host"]["fix"]
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "abc")
    sound = prefill(transfer_host="127.0.0.1")
    found = findings(doctor("--series", "cpu", "--config", sound, "--json"))
    assert "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT" in found["configuration", "options"]["found"]
    monkeypatch.delenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")
    found = findings(doctor("--series", "cpu", "--config", sound, "--json"))
    assert {found[key]["level"] for key in (("configuration", "options"), ("ports", "transfer host"))} == {"ok"}


def test_tables_have_the_fix_below():
    result = doctor("--series", "cpu", "--hash-algo", "xxhash")
    assert result.exit_code == 1
    assert "hash seed: export PYTHONHASHSEED=0 on all hosts" in result.stdout
    assert "mixed on cpu with local: " in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("backend", ["mooncake", "yuanrong"])
@pytest.mark.parametrize("width", ["50", "80"])
def test_tables_cut_nothing_off(monkeypatch, width, backend):
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("PATH", "/no/such/folder")
    told = doctor("--series", "a5", "--backend", backend).stdout
    found = findings(doctor("--series", "a5", "--backend", backend, "--json"))
    assert told.count("…") == sum("".join(one.values()).count("…") for one in found.values())
    assert "hccl_rootinfo.json" in told.split(), "the name of a check stays whole"


def test_what_is_missing_for_npus_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    result = doctor("--series", "a3", "--backend", "mooncake", "--json")
    assert result.exit_code == 1
    found = findings(result)
    assert "MOONCAKE_CONFIG_PATH" in found["configuration", "options"]["found"]
    for key in (("files", "npu devices"), ("npu tools", "npu-smi"), ("versions", "cann"), ("environment", "toolkit")):
        assert found[key]["level"] == "failure"
        assert found[key]["fix"]


def test_ports_and_peers():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = doctor("--series", "cpu", "--port", port, "--peer", f"127.0.0.1:{port}", "--json")
    assert findings(result)["ports", "free"]["level"] == "failure"
    assert findings(result)["ports", "peer"]["level"] == "ok"
    assert result.exit_code == 1


def test_a_bad_directory_is_one_finding_with_its_fix():
    extra = {"backend": "local", "enable_ssd_offload": True, "ssd_offload_path": "/no/such/folder", "local_ssd_size": "1GB"}
    result = doctor("--series", "cpu", "--config", json.dumps(POOL | {"kv_connector_extra_config": extra}), "--json")
    found = findings(result)
    assert "mkdir -p /no/such/folder" in found["ssd", "directory"]["fix"]
    assert ("configuration", "options") not in found
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "/no/such/file"], "error: --config"),
        (["--service", "ls"], "error: --service"),
        (["--peer", "host"], 'error: --peer="host": expected <host>:<port>'),
    ],
)
def test_wrong_arguments(arguments, message):
    result = doctor("--series", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(message)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this system has no /dev/shm")
def test_the_local_store_is_measured_by_default():
    result = CliRunner().invoke(app, ["doctor", "--series", "cpu", "--config", json.dumps(POOL), "--json"])
    speed = findings(result)["measure", "speed"]
    assert "GB/s" in speed["found"], speed


@pytest.mark.parametrize("series", ["cpu", "cuda", "a2", "a3", "a5"])
@pytest.mark.parametrize("backend", ["local", "mooncake", "memcache", "yuanrong"])
def test_a_host_that_shows_nothing_gets_an_answer(tmp_path, series, backend):
    """A system without /proc, /sys, /dev and tools: a laptop."""
    host = Host(env={}, root=tmp_path, run=lambda command: None, version_of=lambda name: None)
    need, found = examine(Asked(series=series, backend=backend, measure=False), host)
    assert (need.series, need.backend) == (series, backend)
    known = {(check.area, check.name) for check in CATALOGUE}
    for finding in found:
        assert (finding.area, finding.check) in known
        assert bool(finding.fix) == (finding.level is not Level.OK), finding
    assert any(finding.level is Level.FAILURE for finding in found)


def test_neither_vllm_nor_a_store_is_imported():
    blocked = ["vllm", "torch", "mooncake", "memcache_hybrid", "memfabric_hybrid", "yr"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from kvpool.cli import app; app()"
    for backend in ("local", "mooncake", "memcache", "yuanrong"):
        command = [sys.executable, "-c", code, "doctor", "--series", "cpu", "--backend", backend, "--no-measure", "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
        assert ran.returncode in (0, 1), ran.stderr
        assert json.loads(ran.stdout)["backend"] == backend


def test_the_same_words_are_said_once():
    said = [SOUND.warning("mooncake.json: HCCL_INTRA_ROCE_ENABLE is not 1", "", "x"), SOUND.warning("another", "", "x")]
    found = [ROCE.failure("HCCL_INTRA_ROCE_ENABLE is not 1", "", "export it"), SEED.ok("another")]
    assert without_repeats(said, found) == said[1:]
    assert without_repeats(said, []) == said


def test_the_page_is_the_code():
    assert (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8") == document()
    for check in CATALOGUE:
        assert f"| {check.name} | " in document()


def test_every_deployment_of_the_cases_is_complete():
    assert {need.series for need in good.EVERY} == {"cpu", "cuda", "a2", "a3", "a5"}
    assert {need.backend for need in good.EVERY} == {"local", "mooncake", "memcache", "yuanrong"}
