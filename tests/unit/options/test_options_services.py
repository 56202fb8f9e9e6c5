"""Commands of services, whose engine moves bytes, leases, and the record by which engines compare their pools."""

from __future__ import annotations

import json

import pytest
from tests.unit.options.mistake_cases import LOCAL, MASTER, META, WORKER, checked, on

from kvpool.options import AscendStoreOptions, OptionError
from kvpool.options.check import check
from kvpool.options.commands import parse_command
from kvpool.options.cross_check import SWITCHES
from kvpool.options.environment import RESOURCE_CONFIG
from kvpool.options.lease import lease_warnings
from kvpool.options.load import read_ascend_store
from kvpool.options.memcache_conf import read_local_conf
from kvpool.options.mooncake_json import read_mooncake
from kvpool.options.mooncake_master import read_master
from kvpool.options.record import StoreRecord, difference, store_record
from kvpool.options.resources import engine_line, read_resources, traffic
from kvpool.options.tenants import policy_tenants
from kvpool.options.versions import check_version, package
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.options.yuanrong_worker import read_worker


def options(**raw):
    return read_mooncake(json.dumps({**MASTER, **raw}), "mooncake.json", {}, on()).options


def command(text):
    return parse_command(text, "--service", SWITCHES)


def test_flags_of_the_master_in_all_their_forms():
    flags = read_master(
        command("env A=1 /usr/bin/mooncake_master --port=1 -rpc_port 2 --noenable_offload \\\n --client_ttl 5 # all"), "m"
    ).options
    assert (flags.port, flags.enable_offload, flags.client_ttl, flags.default_kv_lease_ttl) == (2, False, 5, 10000)
    assert read_master(command("mooncake_master --rpc_port 0 --port 7 --enable_offload"), "m").options.port == 7
    assert read_master(command("mooncake_master --default_kv_lease_ttl 2m"), "m").options.default_kv_lease_ttl == 120_000
    for wrong in ("--eviction_ratio 2", "--default_kv_lease_ttl 0", "--client_ttl=10s", "--port 70000", "--enable_offload=maybe"):
        with pytest.raises(OptionError, match=wrong.replace("--", "").split("=")[0].split()[0]):
            read_master(command(f"mooncake_master {wrong}"), "m")


@pytest.mark.parametrize("text", ["", "vllm serve model", 'mooncake_master "--port'])
def test_other_commands_are_refused(text):
    with pytest.raises(OptionError, match=r"^--service"):
        command(text)


def test_flags_of_a_worker_from_the_command_and_from_a_file(tmp_path):
    worker = read_worker(command("dscli start -N 0 -w --metastore_address 127.0.0.1:2379"), "w", on())
    assert worker.options.worker_address == "127.0.0.1:31501"
    assert read_worker(command("dscli start -c --coordinator_address h:1"), "w", on()) is None
    path = tmp_path / "worker_config.json"
    entries = {"worker_address": "10.0.0.1:1", "etcd_address": "10.0.0.9:2379", "metastore_address": "", "more": "1"}
    path.write_text(json.dumps({key: {"value": value, "description": ""} for key, value in entries.items()}))
    worker = read_worker(command(f"dscli start -f {path}"), "w", on())
    assert (worker.options.worker_address, worker.options.metastore_address) == ("10.0.0.1:1", None)


def test_a_policy_of_tenants():
    text = "version: 1\ntenants:\n  - name: team-a # the first\n    quota: 1GB\n  - quota: 2GB\n    name: 'b c'\n"
    text += '  - name: "default"\n'
    assert policy_tenants(text) == {"team-a", "b c", "default"}
    assert policy_tenants("tenants: []\n") == set()


def test_a_policy_on_another_host_is_said_and_not_an_error(tmp_path):
    services = ["mooncake_master --port 50088 --enable_multi_tenants=true --tenant_quota_connector_uri=/missing/quotas.yaml"]
    lines = checked(tmp_path, {"mooncake.json": json.dumps(MASTER)}, services=services)
    assert [line for line in lines if "cannot be read" in line and "tenants were not compared" in line]
    (tmp_path / "flow.yaml").write_text("{version: 1, tenants: [{name: default, quota: 1GB}]}")
    services = [services[0].replace("/missing/quotas.yaml", str(tmp_path / "flow.yaml"))]
    lines = checked(tmp_path, {"mooncake.json": json.dumps(MASTER)}, services=services)
    assert [line for line in lines if "no line with the name of a tenant" in line]


@pytest.mark.parametrize("raw", [{}, {"protocol": "tcp"}, {"protocol": "rdma"}])
@pytest.mark.parametrize("env", [{}, {"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}, {RESOURCE_CONFIG: "{}"}])
def test_one_line_says_that_the_store_has_a_transfer_engine_of_its_own(raw, env):
    line = engine_line(options(**raw), env)
    assert "the store has a transfer engine of its own (protocol " in line
    assert (RESOURCE_CONFIG in line) is (raw == {} and RESOURCE_CONFIG in env), "only HIXL reads it"


def test_a_priority_is_a_field_for_the_store(tmp_path):
    (tmp_path / "mooncake.json").write_text(json.dumps(MASTER))
    env = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "mooncake.json")}
    for qos in (None, 1):
        loaded = read_ascend_store({"backend": "mooncake", "qos_priority": qos}, kv_role="kv_both", env=env)
        assert "transfer engine of its own" in loaded.notes[0]
        assert ("its store. fields" in loaded.notes[0]) is (qos == 1)
        assert "listens on all interfaces" in loaded.notes[1]


def test_resources_are_typed_and_each_field_says_what_it_governs(tmp_path):
    links = {"comm_resource_config.protocol_desc": ["hccs:device"], "store.comm_resource_config.protocol_desc": ["roce:device"]}
    text = json.dumps({**links, "x": 1})
    reading = read_resources({RESOURCE_CONFIG: text})
    assert (reading.options.protocol, reading.options.store_protocol) == (("hccs:device",), ("roce:device",))
    assert reading.warnings == []
    assert traffic("comm_resource_config.listen_port") == "prefill-to-decode traffic"
    assert traffic("store.comm_resource_config.qos") == "store traffic"
    assert traffic("fabric_memory.max_capacity") == "all traffic of the process"
    assert traffic("x") == ""
    (tmp_path / "mooncake.json").write_text(json.dumps(MASTER))
    report = check(None, [str(tmp_path / "mooncake.json")], {RESOURCE_CONFIG: text}, deployment=on())
    (section,) = [section for section in report.sections if section.title == RESOURCE_CONFIG]
    assert [row.source for row in section.rows] == [
        "environment; governs prefill-to-decode traffic",
        "environment; governs store traffic",
        "environment; governs what HIXL takes it for",
    ]


@pytest.mark.parametrize("value", [[], ["roce"], ["roce:"], ["roce:moon"], [1], {}])
def test_links_of_a_wrong_form(value):
    with pytest.raises(OptionError, match="protocol_desc"):
        read_resources({RESOURCE_CONFIG: json.dumps({"comm_resource_config.protocol_desc": value})})


def test_bc_084_a_lease_is_compared_with_every_time_that_it_must_outlast():
    env = {"ASCEND_CONNECT_TIMEOUT": "10000", "ASCEND_TRANSFER_TIMEOUT": "12000"}
    lines = lease_warnings(11000, env, 30000, "measured lease")
    assert [line.split(" is not longer than ")[1].split("=")[0] for line in lines] == ["ASCEND_TRANSFER_TIMEOUT", "load_timeout_ms"]
    assert lease_warnings(30001, env, 30000, "measured lease") == []
    assert lease_warnings(12000, {}, None, "measured lease") == []


def test_a_lease_over_ascend_is_compared_with_the_longest_transfer_that_nobody_set():
    """4.096 us x 2^20 x 7 retries, and 3 s."""
    (line,) = lease_warnings(33064, {}, 30000, "measured lease", ascend=True)
    assert "33064 ms while ASCEND_TRANSFER_TIMEOUT is not set; raise the lease above 33064" in line
    assert lease_warnings(33065, {}, 30000, "measured lease", ascend=True) == []
    assert lease_warnings(31000, {"ASCEND_TRANSFER_TIMEOUT": "10000"}, 30000, "measured lease", ascend=True) == []
    assert lease_warnings(31000, {"HCCL_RDMA_TIMEOUT": "18"}, 30000, "measured lease", ascend=True) == []


def test_the_meta_file_of_the_environment_is_compared_too(tmp_path):
    (tmp_path / "mmc-meta.conf").write_text(META.replace("5000", "5001"))
    env = {"MMC_META_CONFIG_PATH": str(tmp_path / "mmc-meta.conf")}
    with pytest.raises(OptionError, match=r"meta_service_url.*differs from tcp://h:5001"):
        checked(tmp_path, {"mmc-local.conf": LOCAL}, env=env)
    (tmp_path / "mmc-meta.conf").unlink()
    with pytest.raises(OptionError, match=r"^MMC_META_CONFIG_PATH="):
        checked(tmp_path, {"mmc-local.conf": LOCAL}, env=env)
    assert checked(tmp_path, {"yuanrong.json": json.dumps(WORKER)}, env=env) == []  # only what the chosen store needs is read


def test_the_file_of_a_connector_is_compared_with_the_services(tmp_path):
    (tmp_path / "mooncake.json").write_text(json.dumps(MASTER))
    extra = {"backend": "mooncake"}
    transfer = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    env = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "mooncake.json")}
    with pytest.raises(OptionError, match="but the master listens on port"):
        check(json.dumps(transfer), [], env, deployment=on(), services=["mooncake_master --port 1"])


RECORDS = {
    "mooncake": store_record("mooncake", options(tenant_id="team-a", master_server_address="localhost:50088")),
    "memcache": store_record("memcache", read_local_conf(LOCAL, "f").options),
    "yuanrong": store_record("yuanrong", YuanrongOptions(worker_addr="10.0.0.1:31501")),
    "local": store_record("local", AscendStoreOptions(local_pool_root="/pools", local_pool_name="p")),
}


def test_records():
    assert RECORDS["mooncake"] == StoreRecord("mooncake", "127.0.0.1:50088", "team-a")
    assert RECORDS["memcache"] == StoreRecord("memcache", "h:5000")
    assert RECORDS["yuanrong"] == StoreRecord("yuanrong")
    assert RECORDS["local"] == StoreRecord("local", "/pools/p")
    etcd = store_record("mooncake", options(master_server_address="etcd://10.0.0.1:2379;10.0.0.2:2379"))
    assert etcd.endpoint == "etcd://10.0.0.1:2379;10.0.0.2:2379"


def test_a_difference_is_one_line_naming_the_field():
    mine = StoreRecord("mooncake", "a:1", "default")
    assert difference(mine, mine) == ""
    assert (
        difference(mine, StoreRecord("mooncake", "b:1", "default"))
        == "the mooncake stores differ in endpoint (a:1 here, b:1 there)"
    )
    both = difference(mine, StoreRecord("mooncake", "b:1", "x"))
    assert both == "the mooncake stores differ in endpoint (a:1 here, b:1 there) and tenant (default here, x there)"
    assert difference(mine, RECORDS["yuanrong"]) == "the kind of store differs: mooncake here, yuanrong there"
    assert difference(StoreRecord("yuanrong", "a:1"), StoreRecord("yuanrong")) == ""


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("mooncake", "cpu", "mooncake-transfer-engine-non-cuda"),
        ("mooncake", "cuda", "mooncake-transfer-engine"),
        ("mooncake", "npu", "mooncake-transfer-engine-npu"),
        ("memcache", "cpu", "memcache-hybrid and memfabric-hybrid"),
        ("yuanrong", None, "openyuanrong-datasystem"),
        ("local", "cpu", ""),
    ],
)
def test_the_package_that_fits_the_machine(backend, device, name):
    assert package(backend, device) == name


@pytest.mark.parametrize("installed", ["0.3.13.post1", "0.3.13.post1+local", "0.4", "1", "unknown"])
def test_versions_that_pass(installed):
    check_version("mooncake", installed, options(tenant_id="team-a"), ranged=True)


def test_an_old_version_names_what_needs_more_and_the_package():
    with pytest.raises(OptionError) as caught:
        check_version("mooncake", "0.3.11.post1", options(tenant_id="team-a"), device="cpu")
    assert str(caught.value) == (
        'version of mooncake="0.3.11.post1": is too old: tenant_id=team-a needs at least 0.3.12 '
        "(package mooncake-transfer-engine-non-cuda)"
    )


def test_the_client_of_the_scheduler_follows_use_layerwise():
    assert YuanrongOptions(worker_addr="h:1").scheduler_client == "none"
    assert YuanrongOptions(worker_addr="h:1", use_layerwise=True).scheduler_client == "metadata"
