"""mooncake.json, what wins over it, and its disk tier."""

from __future__ import annotations

import json
import os

import pytest

from kvpool.options import Deployment, OptionError
from kvpool.options.load import load_ascend_store, read_ascend_store
from kvpool.options.mooncake_json import read_mooncake
from kvpool.options.mooncake_ssd import capacity_warnings, check_directory

GIB = 1 << 30
MASTER = {"master_server_address": "127.0.0.1:2"}


def read(raw=(), env=None, deployment=None):
    return read_mooncake(json.dumps({**MASTER, **dict(raw)}), "mooncake.json", env or {}, deployment or Deployment())


def refused(raw, env=None):
    with pytest.raises(OptionError) as caught:
        read(raw, env)
    return str(caught.value)


def test_defaults():
    options = read().options
    assert (options.metadata_server, options.protocol, options.device_name) == ("P2PHANDSHAKE", "ascend", "")
    assert (options.global_segment_size, options.local_buffer_size) == (GIB, GIB)
    assert (options.preferred_segment, options.prefer_alloc_in_same_node, options.enable_ssd_offload) == (False, True, False)
    assert (options.tenant_id, options.tenant_argument, options.ssd_offload_path) == ("default", {}, None)


@pytest.mark.parametrize(
    ("value", "protocol"), [("tcp", "tcp"), ("rdma", "rdma"), ("ascend", "ascend"), ("TCP ", "tcp"), (None, "ascend")]
)
def test_bc_002_protocols(value, protocol):
    assert read({"protocol": value}).options.protocol == protocol


@pytest.mark.parametrize("value", ["", "pigeon", 1, []])
def test_bc_002_unknown_protocols_name_field_and_choices(value):
    message = refused({"protocol": value})
    assert message.startswith("mooncake.json: protocol=")
    assert '"ascend", "rdma", "tcp"' in message


def test_bc_004_master_address_only_in_the_file():
    reading = read()
    assert reading.options.master_server_address == "127.0.0.1:2"
    assert reading.sources["master_server_address"] == "file mooncake.json"
    assert reading.warnings == []


def test_bc_004_master_address_only_in_the_environment():
    reading = read({"master_server_address": None}, {"MOONCAKE_MASTER": "127.0.0.1:1"})
    assert reading.options.master_server_address == "127.0.0.1:1"
    assert reading.sources["master_server_address"] == "environment MOONCAKE_MASTER"
    assert reading.warnings == []


def test_bc_004_master_address_in_both_environment_wins_and_one_line_says_so():
    reading = read(env={"MOONCAKE_MASTER": "127.0.0.1:1"})
    assert reading.options.master_server_address == "127.0.0.1:1"
    assert reading.warnings == ["master_server_address: MOONCAKE_MASTER wins (127.0.0.1:1) over the file (127.0.0.1:2)"]
    assert read(env={"MOONCAKE_MASTER": "127.0.0.1:2"}).warnings == []


def test_bc_004_master_address_nowhere():
    assert "master_server_address" in refused({"master_server_address": None})
    assert "is required" in refused({"master_server_address": None})


def test_bc_004_segment_size():
    assert read({"global_segment_size": "2GB"}).options.global_segment_size == 2 * GIB
    assert read(env={"MOONCAKE_GLOBAL_SEGMENT_SIZE": "3GB"}).options.global_segment_size == 3 * GIB
    both = read({"global_segment_size": "2GB"}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "3GB"})
    assert both.options.global_segment_size == 3 * GIB
    assert len(both.warnings) == 1
    assert read({"global_segment_size": "1024MB"}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "1GB"}).warnings == []
    assert "environment MOONCAKE_GLOBAL_SEGMENT_SIZE: " in refused({}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "3G"})


def test_bc_004_qos_of_the_connector_wins_over_the_environment(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(MASTER))
    env = {"MOONCAKE_CONFIG_PATH": str(path), "ASCEND_GLOBAL_RESOURCE_CONFIG": '{"store.comm_resource_config.qos": 3, "a": 1}'}
    loaded = read_ascend_store({"backend": "mooncake", "qos_priority": 1}, kv_role="kv_both", env=env)
    assert json.loads(loaded.env_updates["ASCEND_GLOBAL_RESOURCE_CONFIG"]) == {"store.comm_resource_config.qos": 1, "a": 1}
    assert len(loaded.warnings) == 1
    assert "qos_priority=1 wins" in loaded.warnings[0]
    assert read_ascend_store({"backend": "mooncake"}, kv_role="kv_both", env=env).env_updates == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "", 50088])
def test_bad_master_addresses(address):
    assert '"<host>:<port>"' in refused({"master_server_address": address})


def test_high_availability_master():
    assert read({"master_server_address": "etcd://10.0.0.1:2379;10.0.0.2:2379"}).options.master_server_address.startswith("etcd://")


@pytest.mark.parametrize("key", ["enable_ssd_offload", "preferred_segment"])
@pytest.mark.parametrize("value", ["maybe", [], 2])
def test_bc_005_bad_switches_name_the_key(key, value):
    assert f"{key}=" in refused({key: value})


@pytest.mark.parametrize("value", [False, "False", "0", 0, None, "false"])
def test_bc_005_a_quoted_false_is_false(value):
    assert read({"enable_ssd_offload": value, "preferred_segment": value}).options.enable_ssd_offload is False


@pytest.mark.parametrize("value", [True, "true", "1", 1])
def test_bc_005_truths(value):
    assert read({"preferred_segment": value}).options.preferred_segment is True


@pytest.mark.parametrize("value", [None, "", "   ", " default ", "default"])
def test_bc_157_spellings_of_the_default_tenant(value):
    options = read({"tenant_id": value}).options
    assert options.tenant_id == "default"
    assert options.tenant_argument == {}


def test_bc_157_absent_tenant_and_other_tenants():
    assert read().options.tenant_argument == {}
    assert read({"tenant_id": " team-a "}).options.tenant_id == "team-a"
    assert len(read({"tenant_id": "x" * 300}).options.tenant_id) == 300
    for value in (7, ["a"], True):
        assert "tenant_id=" in refused({"tenant_id": value})


def test_bc_158_a_tenant_is_always_handed_over():
    assert read({"tenant_id": "team-a"}).options.tenant_argument == {"tenant_id": "team-a"}


def test_fabric_memory_needs_whole_gigabytes():
    fabric = {"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
    assert "multiple of 1GB" in refused({"global_segment_size": "1.5GB"}, fabric)
    assert read({"global_segment_size": "20GB"}, fabric).options.local_buffer_size == 0
    assert len(read({"local_buffer_size": "1GB"}, fabric).warnings) == 1
    assert len(read({"global_segment_size": "1.5GB"}).warnings) == 1
    assert read({"global_segment_size": "1.5GB", "protocol": "tcp"}).warnings == []


def test_unknown_key():
    assert read({"global_segment_sise": 1}).warnings == [
        "mooncake.json: unknown key 'global_segment_sise' is ignored: did you mean global_segment_size?"
    ]


@pytest.fixture
def bad_paths(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "sub").mkdir()
    return {
        "": "is required",
        "relative/dir": "is not absolute",
        f"{tmp_path}/real/../real": "must not contain ..",
        f"{tmp_path}/link": "symbolic link",
        f"{tmp_path}/link/sub": "symbolic link",
        f"{tmp_path}/missing": "does not exist",
        f"{tmp_path}/file": "is not a directory",
        7: "expected an absolute path",
    }


def test_bc_156_each_bad_directory_has_its_own_error(bad_paths):
    messages = {refused({"enable_ssd_offload": True, "ssd_offload_path": path}) for path in bad_paths}
    assert len(messages) == len(bad_paths)
    for path, fragment in bad_paths.items():
        assert fragment in refused({"enable_ssd_offload": True, "ssd_offload_path": path})


def test_bc_156_directories_are_not_judged_when_the_tier_is_off(bad_paths):
    for path in bad_paths:
        for off in (False, "false", None):
            assert read({"enable_ssd_offload": off, "ssd_offload_path": path}).warnings == []


def test_bc_156_not_writable_and_trailing_slash(tmp_path, monkeypatch):
    assert check_directory(f"{tmp_path}/", "f") == str(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="is not writable"):
        check_directory(str(tmp_path), "f")


SSD_LIMIT = {"MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "1", "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru"}


def test_the_disk_tier_is_validated_before_anything_starts(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**MASTER, "enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}))
    env = {"MOONCAKE_CONFIG_PATH": str(path), **SSD_LIMIT}
    loaded = load_ascend_store({"backend": "mooncake"}, kv_role="kv_both", env=env)
    assert loaded.backend_file.options.enable_ssd_offload
    assert loaded.warnings == []
    path.write_text(json.dumps({**MASTER, "enable_ssd_offload": True, "ssd_offload_path": str(tmp_path / "other")}))
    with pytest.raises(OptionError, match="does not exist"):
        load_ascend_store({"backend": "mooncake"}, kv_role="kv_both", env=env)


@pytest.mark.parametrize(
    ("env", "fragment"),
    [
        ({"MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": "10GB"}, "digits only"),
        ({"MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "1e9"}, "digits only"),
        ({"MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": "-1"}, "digits only"),
        ({"MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "random"}, "none, fifo or lru"),
        ({"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}, "multiple of 1GB"),
    ],
)
def test_variables_that_the_library_would_ignore_or_die_of(env, fragment, tmp_path):
    assert fragment in refused({"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}, {**SSD_LIMIT, **env})


def test_fabric_quota_that_is_too_small(tmp_path):
    env = {
        **SSD_LIMIT,
        "ASCEND_ENABLE_USE_FABRIC_MEM": "1",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(GIB),
        "ASCEND_GLOBAL_RESOURCE_CONFIG": '{"fabric_memory.max_capacity": 20}',
    }
    raw = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path), "global_segment_size": "20GB"}
    assert any("max_capacity=20" in line for line in read(raw, env).warnings)
    env["ASCEND_GLOBAL_RESOURCE_CONFIG"] = '{"fabric_memory.max_capacity": 32}'
    assert read(raw, env).warnings == []


def test_bc_120_limits_of_all_ranks_against_the_disk():
    assert len(capacity_warnings(2199023255552, 8, 800 * GIB)) == 1
    assert capacity_warnings(100 * GIB, 8, 800 * GIB) == []
    assert Deployment(tp=4, dp=2).ranks == 8
