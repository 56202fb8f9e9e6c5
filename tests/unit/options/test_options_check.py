"""`kvpool config check`: what it prints, how it fails, and how it cleans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.devices import copy_engine, device_of
from kvpool.options.document import document
from kvpool.options.probe import HOST
from kvpool.stores.memcache.directions import directions

POOL = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "local", "cache_namespace": "m1"},
}
MEMCACHE_LOCAL = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.local_service.config_store_url = tcp://h:6000\n"
MEMCACHE_META = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.meta_service.config_store_url = tcp://h:6001\n"
VARIABLES = (
    "MOONCAKE_CONFIG_PATH",
    "MOONCAKE_MASTER",
    "MMC_LOCAL_CONFIG_PATH",
    "YR_CONFIG_PATH",
    "DS_WORKER_ADDR",
    "PYTHONHASHSEED",
    "MMC_META_CONFIG_PATH",
    "ASCEND_GLOBAL_RESOURCE_CONFIG",
)


@pytest.fixture
def run(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(HOST, "accelerator", lambda: None)

    def invoke(*arguments, env=None):
        return CliRunner().invoke(app, ["config", "check", *map(str, arguments)], env={"COLUMNS": "200", **(env or {})})

    return invoke


def test_report_as_json(run):
    result = run(json.dumps(POOL), "--json", env={"PYTHONHASHSEED": "0"})
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    sections = {section["title"]: section["options"] for section in report["sections"]}
    assert sections["AscendStoreConnector"]["local_dram_size"] == {"value": 4 << 30, "source": "default"}
    assert sections["AscendStoreConnector"]["cache_namespace"] == {"value": "m1", "source": "JSON"}
    assert sections["kv-transfer-config"]["kv_load_failure_policy"] == {"value": "fail", "source": "default"}
    namespace = sections["namespace inputs (the same on all engines that share)"]
    assert namespace["model identity"]["value"] == "m1"
    assert namespace["hash seed"]["value"] == "PYTHONHASHSEED=0"
    assert len(report["warnings"]) == 1


def test_report_as_tables(run):
    result = run(json.dumps(POOL))
    assert result.exit_code == 0
    assert "local_dram_size" in result.stdout
    assert "warning: kv_load_failure_policy is not set" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kv_connector": 3}', "error: kv_connector=3: is required"),
        ('{"kv_connector": "x" # y\n}', "error: kv-transfer-config: line 1: a comment is not JSON"),
        (json.dumps({**POOL, "kv_connector_extra_config": {"backend": "mooncake"}}), "error: MOONCAKE_CONFIG_PATH: is not set"),
    ],
)
def test_errors_are_one_line_and_exit_status_two(run, text, message):
    result = run(text)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_additional_config(run):
    result = run(json.dumps(POOL), "--additional-config", '{"sparse_kv_offload_config": {"topk_buffer_size": 0}}')
    assert result.exit_code == 2
    assert "topk_buffer_size=0" in result.stderr


def test_sources_of_the_additional_config(run):
    result = run(json.dumps(POOL), "--additional-config", '{"sparse_kv_offload_config": {"topk_buffer_size": "2048"}}', "--json")
    sections = {section["title"]: section["options"] for section in json.loads(result.stdout)["sections"]}
    assert sections["sparse_kv_offload_config"]["topk_buffer_size"] == {"value": 2048, "source": "JSON"}
    assert sections["sparse_kv_offload_config"]["dram_size_per_dp_GB"] == {"value": 128, "source": "default"}


def test_hash_algorithm(run):
    wrong = run(json.dumps(POOL), "--hash-algo", "md5")
    assert wrong.exit_code == 2
    assert '--hash-algo="md5"' in wrong.stderr
    assert "sha256, sha256_cbor, xxhash, xxhash_cbor" in wrong.stderr
    assert "PYTHONHASHSEED is not set" in run(json.dumps(POOL), "--hash-algo", "xxhash").stdout
    assert "PYTHONHASHSEED is not set" not in run(json.dumps(POOL)).stdout


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '{"master_server_address": "h:1"}', "mooncake"),
        ("mooncake.json", '{"metadata_server": "P2PHANDSHAKE"}', None),
        ("b.json", '{"worker_addr": "h:1"}', "yuanrong"),
        ("x.conf", MEMCACHE_LOCAL, "memcache local"),
        ("mmc-meta.conf", MEMCACHE_META, "memcache meta"),
        ("kv.json", json.dumps(POOL), "AscendStoreConnector"),
    ],
)
def test_files_are_told_apart(run, tmp_path, name, text, kind):
    path = tmp_path / name
    path.write_text(text)
    result = run("--file", path, "--json")
    if kind is None:
        assert result.exit_code == 2
        assert "master_server_address" in result.stderr
    else:
        assert any(section["title"].startswith(kind) for section in json.loads(result.stdout)["sections"])


def test_files_that_nobody_knows_or_that_disagree(run, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert "is neither" in run("--file", tmp_path / "x.json").stderr
    assert "cannot be read" in run("--file", tmp_path / "missing").stderr
    (tmp_path / "mmc-local.conf").write_text(MEMCACHE_LOCAL)
    (tmp_path / "mmc-meta.conf").write_text(MEMCACHE_META)
    result = run("--file", tmp_path / "mmc-local.conf", "--file", tmp_path / "mmc-meta.conf")
    assert result.exit_code == 2
    assert "differs from tcp://h:6001" in result.stderr


def test_what_is_said_of_the_deployment(run, tmp_path):
    (tmp_path / "mooncake.json").write_text('{"master_server_address": "localhost:1"}')
    (tmp_path / "mmc-local.conf").write_text(MEMCACHE_LOCAL)
    (tmp_path / "mmc-meta.conf").write_text(MEMCACHE_META)
    mooncake = ("--file", tmp_path / "mooncake.json")
    assert "give --device" in run(*mooncake).stdout
    assert "needs an NPU, but the KV lies on cpu" in run(*mooncake, "--device", "CPU").stderr
    assert run(*mooncake, "--device", "a3").exit_code == 0
    assert "2 hosts share the pool" in run(*mooncake, "--hosts", 2).stderr
    assert "listens on port 2" in run(*mooncake, "--service", "mooncake_master --port 2").stderr
    assert "1000000 ranks take" in run(*mooncake, "--ranks", 1000000).stdout
    assert "differs from tcp://h:6001" in run("--file", tmp_path / "mmc-local.conf", "--meta", tmp_path / "mmc-meta.conf").stderr
    assert "port of the proxy (6001)" in run("--file", tmp_path / "mmc-meta.conf", "--proxy-port", 6001).stderr
    assert "listens on all interfaces" in run(*mooncake, "--json").stdout


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize(("backend", "start"), [("local", copy_engine), ("memcache", directions)])
def test_a_store_that_the_start_refuses_on_a_device_is_refused_by_the_check(run, tmp_path, backend, start, device):
    (tmp_path / "mmc-local.conf").write_text(MEMCACHE_LOCAL + "ock.mmc.local_service.protocol = host_shm\n")
    config = {**POOL, "kv_connector_extra_config": {"backend": backend}}
    checks = [(json.dumps(config),)] + ([("--file", tmp_path / "mmc-local.conf")] if backend == "memcache" else [])
    env = {"MMC_LOCAL_CONFIG_PATH": str(tmp_path / "mmc-local.conf")} if backend == "memcache" else {}
    try:
        start(device)
        accepted = True
    except ValueError:
        accepted = False
    for arguments in checks:
        result = run(*arguments, "--device", device, env=env)
        assert (result.exit_code == 0) == accepted, result.output
        if not accepted:
            assert f'backend="{backend}": does not reach the memory of {device}; accepted: mooncake' in result.stderr
            assert len(result.stderr.strip().splitlines()) == 1


def test_a_device_on_which_no_engine_of_this_version_starts_is_said(run, tmp_path):
    (tmp_path / "mooncake.json").write_text('{"master_server_address": "localhost:1", "protocol": "tcp"}')
    said = {device: run("--file", tmp_path / "mooncake.json", "--device", device).stdout for device in ("cpu", "cuda")}
    assert "engines refuse to start on cuda yet" in said["cuda"]
    assert "refuse to start" not in said["cpu"]
    with pytest.raises(ValueError, match="not available yet"):
        device_of("cuda")


def test_fix_writes_the_clean_text(run, tmp_path):
    out = tmp_path / "out"
    result = run(json.dumps(POOL)[:-1] + "} # note", "--fix", out)
    assert result.exit_code == 0
    assert json.loads(out.read_text()) == POOL
    assert "kv-transfer-config: line 1: removed a comment" in result.stdout
    (tmp_path / "mmc-local.conf").write_text(MEMCACHE_LOCAL + "ock.mmc.log_level = info # x\n")
    assert run("--file", tmp_path / "mmc-local.conf", "--fix", out).exit_code == 0
    assert out.read_text() == MEMCACHE_LOCAL + "ock.mmc.log_level = info\n"


def test_fix_writes_exactly_one_file(run, tmp_path):
    out = tmp_path / "out"
    assert "nothing needed cleaning" in run(json.dumps(POOL), "--fix", out).stderr
    (tmp_path / "mooncake.json").write_text('{"master_server_address": "h:1",}')
    assert "writes one file" in run(json.dumps(POOL) + "#", "--file", tmp_path / "mooncake.json", "--fix", out).stderr
    assert not out.exists()
    assert run(json.dumps(POOL) + "#", "--fix", tmp_path / "no" / "out").exit_code == 2


def test_the_committed_reference_is_current():
    committed = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert committed.read_text(encoding="utf-8") == document(), "run: python -m kvpool.options.document > docs/configuration.md"
