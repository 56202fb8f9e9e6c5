"""From flags, files and commands to what is needed of a host, also where a configuration is refused."""

from __future__ import annotations

import json

import pytest

from kvpool.ops.doctor.choosing import Asked, choose
from kvpool.ops.doctor.finding import Level
from kvpool.ops.doctor.need import Endpoint
from kvpool.ops.doctor.raw import Disks
from kvpool.options import OptionError
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.probe import Probe

SIDE = {"tp_size": 2, "dp_size": 2}


def pool(role="kv_both", **extra):
    return {"kv_connector": "AscendStoreConnector", "kv_role": role, "kv_connector_extra_config": extra}


def multi(role, **extra):
    pull = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": role,
        "kv_port": "20001",
        "kv_connector_extra_config": {"prefill": SIDE, "decode": SIDE},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [pull, pool(role, **extra)]},
    }


@pytest.fixture
def chosen(tmp_path):
    def ask(*configs, env=None, series="cpu", **flags):
        paths = []
        for config in configs:
            if isinstance(config, tuple):
                (tmp_path / config[0]).write_text(config[1])
                paths.append(str(tmp_path / config[0]))
            else:
                paths.append(json.dumps(config))
        return choose(Asked(series=series, configs=tuple(paths), **flags), env or {}, Probe(str(tmp_path)))

    return ask


@pytest.mark.parametrize(
    ("series", "env", "backend"),
    [
        ("cpu", {}, "local"),
        ("cuda", {}, "mooncake"),
        ("a2", {}, "mooncake"),
        ("a5", {"MMC_LOCAL_CONFIG_PATH": "x"}, "memcache"),
        ("a3", {"DS_WORKER_ADDR": "127.0.0.1:1"}, "yuanrong"),
    ],
)
def test_a_store_that_nobody_names_is_the_usual_one_of_the_series(chosen, series, env, backend):
    need, _ = chosen(series=series, env=env)
    assert (need.backend, need.measure) == (backend, backend == "local")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"series": "a2", "link": "ub"}, '--link="ub": accepted with --series a2: roce'),
        ({"series": "a3", "link": "ub"}, '--link="ub": accepted with --series a3: hccs, roce'),
        ({"series": "cpu", "link": "roce"}, '--link="roce": accepted with --series cpu: none'),
        ({"series": None, "link": "roce"}, '--link="roce": accepted with --series cpu: none'),
    ],
)
def test_links_that_the_series_does_not_have_are_refused_as_up_does(chosen, flags, line):
    with pytest.raises(OptionError) as refused:
        chosen(**flags)
    assert str(refused.value) == line


def mooncake(**keys):
    return "mooncake.json", json.dumps({"master_server_address": "10.0.0.9:50088", "protocol": "tcp", **keys})


def levels(findings):
    return [finding.level for finding in findings]


def test_nothing_given_is_an_engine_with_the_local_store(chosen):
    need, said = chosen()
    assert (need.role, need.series, need.backend, need.measure) == ("mixed", "cpu", "local", True)
    assert need.options is not None
    assert need.options.local_dram_size == 4 << 30
    assert levels(said) == [Level.OK]


def test_the_series_is_what_the_host_shows(chosen, tmp_path):
    assert chosen(series=None)[0].series == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert chosen(series=None)[0].series == "cuda"
    (tmp_path / "dev/davinci0").touch()
    with pytest.raises(OptionError, match=r"--series.*a2, a3 or a5"):
        chosen(series=None)


def test_a_whole_deployment(chosen):
    need, said = chosen(multi("kv_producer", backend="mooncake", load_timeout_ms=5000), mooncake(), ranks=4, measure=False)
    assert (need.role, need.backend, need.ranks, need.measure) == ("prefill", "mooncake", 4, False)
    assert isinstance(need.conf, MooncakeOptions)
    assert need.services == (Endpoint("mooncake_master", "10.0.0.9:50088"),)
    assert [endpoint.address for endpoint in need.ports] == [":20001", ":20003"]  # one listener for each data-parallel rank
    assert need.options is not None
    assert need.options.load_timeout_ms == 5000
    assert need.conf_variable == "MOONCAKE_CONFIG_PATH"
    assert need.conf_path.endswith("mooncake.json")
    assert Level.FAILURE not in levels(said)


def test_what_this_version_refuses_is_known_all_the_same(chosen):
    remote = {"kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {}}
    layers = pool("kv_producer", backend="memcache", use_layerwise=True)
    both = multi("kv_producer", backend="memcache", use_layerwise="true")
    both["kv_connector_extra_config"]["connectors"][0] = remote
    found = {}
    for name, config in {"plain": pool(backend="memcache"), "layers": layers, "remote": remote, "both": both}.items():
        need, _ = chosen(config, series="a3")
        found[name] = (need.layerwise, need.remote_d2h, need.of_layerwise_guide)
    assert found == {
        "plain": (False, False, False),
        "layers": (True, False, True),
        "remote": (False, True, True),
        "both": (True, True, True),
    }


def test_decode_listens_nowhere(chosen):
    assert chosen(multi("kv_consumer", backend="local"))[0].ports == ()


def test_the_stores_file_alone_says_which_store(chosen):
    need, said = chosen(mooncake())
    assert need.backend == "mooncake"
    assert isinstance(need.conf, MooncakeOptions)
    assert levels(said) == [Level.OK]


def test_the_environment_names_the_file(chosen, tmp_path):
    (tmp_path / "m.json").write_text(mooncake()[1])
    need, said = chosen(env={"MOONCAKE_CONFIG_PATH": str(tmp_path / "m.json")})
    assert (need.backend, need.conf_path) == ("mooncake", str(tmp_path / "m.json"))
    assert levels(said) == [Level.OK]
    (tmp_path / "m.json").write_text("{")
    need, said = chosen(env={"MOONCAKE_CONFIG_PATH": str(tmp_path / "m.json")})
    assert (need.backend, need.conf) == ("mooncake", None)
    assert levels(said) == [Level.FAILURE]


def test_a_store_without_its_file_is_a_failure_that_names_the_variable(chosen):
    need, said = chosen(backend="memcache", role="prefill")
    assert need.backend == "memcache"
    assert "MMC_LOCAL_CONFIG_PATH" in said[0].found
    assert levels(said) == [Level.FAILURE]


def test_a_refused_configuration_still_says_which_store_and_which_disks(chosen):
    need, said = chosen(pool(backend="local", enable_ssd_offload="true", ssd_offload_path="/no/such/folder", local_ssd_size="1GB"))
    assert levels(said) == [Level.FAILURE]
    assert (need.backend, need.options) == ("local", None)
    assert need.disks == Disks(("/no/such/folder",))
    need, said = chosen(mooncake(enable_ssd_offload=True, ssd_offload_path="relative"))
    assert levels(said) == [Level.FAILURE]
    assert need.disks == Disks(("relative",))
    assert chosen(mooncake(ssd_offload_path="relative"))[0].disks == Disks()


def test_disks_of_memcache(chosen):
    local = "ock.mmc.local_service"
    lines = [
        "ock.mmc.meta_service_url = tcp://10.0.0.9:5000",
        f"{local}.config_store_url = tcp://10.0.0.9:6000",
        f"{local}.protocol = host_tcp",
        f"{local}.storage.enabled = true",
        "ubsio.disk.path = /dev/nvme1n1:/dev/nvme2n1",
        "ubsio.standalone.force_new_disk = false",
    ]
    need, _ = chosen(("mmc-local.conf", "\n".join(lines)))
    assert need.disks == Disks(devices=("/dev/nvme1n1", "/dev/nvme2n1"), wiped=False)
    lines[3] = f"{local}.storage.enabled = false"
    need, _ = chosen(("mmc-local.conf", "\n".join(lines)))
    assert need.disks == Disks()
    assert [endpoint.address for endpoint in need.services] == ["tcp://10.0.0.9:5000", "tcp://10.0.0.9:6000"]


def test_services_and_leases(chosen):
    meta = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.meta_service.config_store_url = tcp://h:6000\n"
    need, _ = chosen(
        ("mmc-meta.conf", meta + "ock.mmc.meta.lease_ttl_ms = 30000\n"),
        commands=("mooncake_master --port 50088 --default_kv_lease_ttl 11000",),
    )
    assert need.leases == (("default_kv_lease_ttl", 11000), ("ock.mmc.meta.lease_ttl_ms", 30000))
    worker = "dscli start -w --worker_address 10.0.0.1:31501 --etcd_address 10.0.0.2:2379,10.0.0.3:2379"
    need, _ = chosen(env={"DS_WORKER_ADDR": "10.0.0.1:31501"}, commands=(worker,))
    addresses = ["10.0.0.1:31501", "10.0.0.2:2379", "10.0.0.3:2379"]
    assert [endpoint.address for endpoint in need.services] == addresses
    assert need.backend == "yuanrong"


@pytest.mark.parametrize(
    ("series", "env", "link"),
    [
        ("a2", {}, "roce"),
        ("a3", {}, None),
        ("a3", {"HCCL_INTRA_ROCE_ENABLE": "1"}, "roce"),
        ("a3", {"HCCL_INTRA_ROCE_ENABLE": "1", "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}, None),
        ("a5", {}, None),
        ("cpu", {}, None),
    ],
)
def test_links(chosen, series, env, link):
    assert chosen(series=series, env=env, backend="mooncake")[0].link == link


@pytest.mark.parametrize(
    ("series", "protocol", "link"),
    [("a3", "device_sdma", "hccs"), ("a3", "device_rdma", "roce"), ("a5", "device_urma", "ub"), ("a5", "device_uboe", "uboe")],
)
def test_the_protocol_of_memcache_shows_the_link(chosen, series, protocol, link):
    text = "ock.mmc.meta_service_url = tcp://10.0.0.9:5000\nock.mmc.local_service.config_store_url = tcp://10.0.0.9:6000\n"
    need, _ = chosen(("mmc-local.conf", f"{text}ock.mmc.local_service.protocol = {protocol}\n"), series=series)
    assert (need.link, need.protocol) == (link, protocol)


def test_ports_of_hixl_and_further_ones(chosen):
    env = {"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.listen_port": 16700}'}
    assert [endpoint.address for endpoint in chosen(env=env, ports=(8000,))[0].ports] == [":16700", ":8000"]


def test_a_role_that_is_not_that_of_the_configuration(chosen):
    _, said = chosen(pool("kv_producer", backend="local"), role="decode")
    assert said[-1].level is Level.FAILURE
    assert "kv_consumer" in said[-1].fix


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (['{"x": 1}'], "^--config=.*neither mooncake.json"),
        (['{"kv_connector": oops}'], "^--config: line 1"),
        (["/no/such/file"], "--config.*cannot be read"),
        ([json.dumps(pool()), json.dumps(pool())], "second kv-transfer-config"),
        (['{"worker_addr": "h:1"}'], "or the path of a file"),
    ],
)
def test_flags_that_cannot_be_understood(tmp_path, configs, message):
    with pytest.raises(OptionError, match=message):
        choose(Asked(series="cpu", configs=tuple(configs)), {}, Probe(str(tmp_path)))
    with pytest.raises(OptionError, match="mooncake_master or dscli"):
        choose(Asked(series="cpu", commands=("ls",)), {}, Probe(str(tmp_path)))
