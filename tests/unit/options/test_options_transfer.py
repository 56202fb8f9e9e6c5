"""The whole kv-transfer-config: names, roles, ports, policies, nesting, and what belongs together."""

from __future__ import annotations

import copy

import pytest

from kvpool.options import Deployment, NotAvailableError, OptionError, parse_transfer_config
from kvpool.options.transfer import read_transfer_config

POOL = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backend": "local"}}
PULL = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_producer",
    "kv_port": "20001",
    "kv_connector_extra_config": {"prefill": {"dp_size": 1, "tp_size": 8}, "decode": {"dp_size": 1, "tp_size": 8}},
}
REMOTE = {
    "kv_connector": "SfaRemoteD2HConnector",
    "kv_role": "kv_consumer",
    "kv_port": 20050,
    "kv_connector_extra_config": {"transfer_backend": "memfabric"},
}


def multi(*children, **top):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": list(children)},
        **top,
    }


def parse(raw, **kwargs):
    return parse_transfer_config(raw, env={}, **kwargs)


def read(raw, **kwargs):
    return read_transfer_config(raw, env={}, **kwargs)


def refused(raw, **kwargs):
    with pytest.raises(OptionError) as caught:
        read(raw, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def extra(entry, **changes):
    changed = copy.deepcopy(entry)
    changed["kv_connector_extra_config"].update(changes)
    return changed


def test_one_connector():
    parsed = parse({**POOL, "kv_load_failure_policy": "recompute"})
    assert parsed.warnings == []
    assert not parsed.multi
    assert parsed.kv_load_failure_policy == "recompute"
    assert [(c.name, c.path, c.kv_role, c.kv_port) for c in parsed.connectors] == [("AscendStoreConnector", "", "kv_both", 14579)]


def test_bc_006_absent_policy_is_fail_and_said_once():
    parsed = parse(POOL)
    assert parsed.kv_load_failure_policy == "fail"
    assert [line for line in parsed.warnings if "kv_load_failure_policy" in line] == parsed.warnings
    assert len(parsed.warnings) == 1
    assert parse({**POOL, "kv_load_failure_policy": "fail"}).warnings == []


def test_bc_006_other_policies_are_refused():
    assert 'kv_load_failure_policy="retry": expected "recompute" or "fail"' in refused({**POOL, "kv_load_failure_policy": "retry"})


def test_bc_006_policy_on_a_child_has_no_effect_and_is_one_warning():
    parsed = parse(multi({**POOL, "kv_load_failure_policy": "recompute"}, kv_role="kv_both"))
    assert parsed.kv_load_failure_policy == "fail"
    assert sum("move it to the top level" in line for line in parsed.warnings) == 1
    top = parse(multi({**POOL, "kv_load_failure_policy": "fail"}, kv_role="kv_both", kv_load_failure_policy="recompute"))
    assert top.kv_load_failure_policy == "recompute"
    assert len(top.warnings) == 1


def test_children_are_parsed_with_their_paths():
    parsed = read(multi(PULL, {**POOL, "kv_role": "kv_producer"}))
    assert [(c.name, c.path, c.kv_port) for c in parsed.connectors] == [
        ("MooncakeConnectorV1", "connectors[0]", 20001),
        ("AscendStoreConnector", "connectors[1]", 14579),
    ]
    assert refused(multi(PULL, extra({**POOL, "kv_role": "kv_producer"}, load_async="maybe"))).startswith(
        "connectors[1] AscendStoreConnector: load_async="
    )


def test_unknown_keys_everywhere_are_one_warning_each():
    raw = multi(extra(POOL, lod_async=True), kv_role="kv_both", kv_load_failure_policy="fail", kv_prot=3)
    raw["kv_connector_extra_config"]["conectors"] = []
    raw["kv_connector_extra_config"]["connectors"][0]["kv_rol"] = "x"
    warnings = parse(raw).warnings
    for near in ("did you mean kv_port?", "did you mean connectors?", "did you mean kv_role?", "did you mean load_async?"):
        assert sum(near in line for line in warnings) == 1
    assert len(warnings) == 4


@pytest.mark.parametrize("port", [True, 0, 65536, "x", 1.5, -1, ""])
def test_bad_ports(port):
    assert "kv_port" in refused({**POOL, "kv_port": port})


def test_engine_id_belongs_to_the_top():
    assert parse({**POOL, "engine_id": "a"}).connectors
    assert refused(multi({**POOL, "engine_id": "a"})).startswith("connectors[0]: engine_id=")


@pytest.mark.parametrize("connectors", [None, [], {}, "x", [3]])
def test_bad_children(connectors):
    assert "MultiConnector" in refused(
        {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": connectors}}
    )


def test_bad_nesting_and_doubles():
    assert "cannot be nested" in refused(multi(multi(POOL)))
    assert "may appear once" in refused(multi(POOL, POOL))
    assert "expected an object" in refused({**POOL, "kv_connector_extra_config": []})


@pytest.mark.parametrize("role", [None, "both"])
def test_role_is_required_at_the_top_and_on_children(role):
    assert "kv_role" in refused({**POOL, "kv_role": role})
    assert refused(multi({**POOL, "kv_role": role})).startswith("connectors[0]: kv_role")


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        (None, "is required"),
        ("", "is required"),
        (3, "is required"),
        ("AscendStoreConector", "did you mean AscendStoreConnector?"),
        ("Zzz", "kv_connector_module_path"),
        ("MooncakeLayerwiseConnector", "is not part of kvpool"),
        ("MooncakeHybridConnector", "cannot be configured"),
    ],
)
def test_names(name, fragment):
    assert fragment in refused({**POOL, "kv_connector": name})
    assert fragment in refused(multi({**POOL, "kv_connector": name}))


def test_names_of_others_pass_unchecked():
    assert parse({"kv_connector": "NixlConnector", "kv_role": "kv_both"}).connectors[0].options is None
    assert (
        parse({"kv_connector": "Mine", "kv_role": "kv_both", "kv_connector_module_path": "my.module"}).connectors[0].options is None
    )


def test_old_name_of_the_pool_connector():
    parsed = parse({**POOL, "kv_connector": "MooncakeConnectorStoreV1", "kv_load_failure_policy": "fail"})
    assert parsed.connectors[0].name == "AscendStoreConnector"
    assert parsed.warnings == ["kv_connector MooncakeConnectorStoreV1 is deprecated: use AscendStoreConnector"]


@pytest.mark.parametrize("entry", [REMOTE])
def test_connectors_of_later_versions_are_validated_first(entry):
    with pytest.raises(NotAvailableError, match=f'kv_connector="{entry["kv_connector"]}": is not available yet'):
        parse(entry)
    with pytest.raises(OptionError) as caught:
        parse(multi(entry, extra(POOL, load_async="maybe")))
    assert not isinstance(caught.value, NotAvailableError)


def sides(prefill, decode):
    return extra(PULL, prefill={"tp_size": 8, "dp_size": 1} | prefill, decode={"tp_size": 8, "dp_size": 1} | decode)


@pytest.mark.parametrize(
    ("entry", "deployment", "fragment"),
    [
        (extra(PULL, prefill=None), Deployment(), "prefill=null: is required"),
        (extra(PULL, decode=3), Deployment(), "decode=3: is required"),
        (sides({"tp_size": None}, {}), Deployment(), "tp_size=null: is required"),
        (sides({"dp_size": 0}, {}), Deployment(), "dp_size=0"),
        (sides({}, {"pp_size": 2}), Deployment(), "must be 1 on the decode side"),
        (sides({"tp_size": 4}, {}), Deployment(), "must be a multiple of the decode side's 8"),
        (sides({"pp_size": 2, "pp_layer_partition": "61"}, {}), Deployment(), "names 1 stages"),
        (PULL, Deployment(tp=4), "this engine runs with 4"),
        ({**PULL, "kv_role": "kv_consumer"}, Deployment(pcp=2), "context parallelism"),
        ({**PULL, "kv_role": "kv_both"}, Deployment(), "expected kv_producer or kv_consumer"),
        ({**PULL, "kv_port": 65530}, Deployment(), "8 ports are used"),
    ],
)
def test_pull_connector(entry, deployment, fragment):
    assert fragment in refused(entry, deployment=deployment)


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("transfer_engine", "nixl", '"auto", "local_host", "process_vm", "mooncake"'),
        ("transfer_protocol", "sdma", '"tcp", "rdma", "ascend"'),
        ("transfer_host", "tcp://node", "a host name or address"),
        ("transfer_buffer_size", "1G", "a unit B, KB, MB, GB or TB"),
        ("transfer_buffer_size", 0, "at least 1MB"),
        ("transfer_root", "relative", "an absolute path"),
        ("transfer_require_auth", "maybe", "true or false"),
        ("cache_namespace", "a b", "1 to 64 characters"),
    ],
)
def test_how_pull_transfers_travel(key, value, fragment):
    line = refused(extra(PULL, **{key: value}))
    assert line.startswith(f"{key}=")
    assert fragment in line


def test_pull_transfer_options_arrive():
    given = {"transfer_engine": "Process_VM", "transfer_host": "::1", "transfer_buffer_size": "64MB", "transfer_root": "/dev/shm"}
    entry = parse(multi(extra(PULL, **given), {**POOL, "kv_role": "kv_producer"})).connectors[0]
    options = entry.options
    assert (options.transfer_engine, options.transfer_host, options.transfer_buffer_size) == ("process_vm", "::1", 64 << 20)
    assert entry.sources["transfer_engine"] == "JSON"
    assert entry.sources["transfer_protocol"] == "default"
    assert parse(PULL).connectors[0].options.transfer_engine == "auto"


def test_pull_connector_accepts_and_warns():
    assert read(sides({"tp_size": "8"}, {"tp_size": 4}), deployment=Deployment(tp=8)).connectors[0].options.decode.tp_size == 4
    assert "did you mean tp_size?" in read(sides({"tp_sizes": 1}, {})).warnings[0]
    assert "did you mean decode?" in read(extra(PULL, decod=1)).warnings[0]


@pytest.mark.parametrize(
    ("entry", "fragment"),
    [
        (extra(REMOTE, transfer_backend=None), "is required"),
        (extra(REMOTE, transfer_backend="mooncake"), "memfabric"),
        (extra(REMOTE, memfabric_transfer_protocol="rdma"), '"sdma", "device_rdma", "device_urma"'),
        (extra(REMOTE, use_layerwise="maybe"), "true or false"),
        ({**REMOTE, "kv_role": "kv_both"}, "kv_producer or kv_consumer"),
    ],
)
def test_bc_176_remote_d2h_connector(entry, fragment):
    assert fragment in refused(entry)


def test_remote_d2h_ports_and_protocols():
    assert "4 ports" in refused({**REMOTE, "kv_port": 65533}, deployment=Deployment(dp=2, tp=2))
    assert read({**REMOTE, "kv_port": 65532}, deployment=Deployment(dp=2, tp=2)).connectors
    for protocol in ("sdma", "device_rdma", "device_urma"):
        assert (
            read(extra(REMOTE, memfabric_transfer_protocol=protocol)).connectors[0].options.memfabric_transfer_protocol == protocol
        )
    assert len(read(extra(REMOTE, use_layerwise=False)).warnings) == 1


SPARSE = {"sparse_kv_offload_config": {"enabled": True}}


def test_remote_d2h_and_sparse_go_together_on_decode():
    assert "needs sparse_kv_offload_config.enabled" in refused(REMOTE, additional_config={})
    assert "kv_consumer only" in refused({**REMOTE, "kv_role": "kv_producer"}, additional_config=SPARSE)
    assert read(REMOTE, additional_config=SPARSE).sparse.enabled
    assert read(REMOTE).sparse is None


def sparse(raw=(), role="kv_consumer", deployment=None):
    return read(
        {**POOL, "kv_role": role, "kv_load_failure_policy": "fail"} | {"kv_connector": "ExampleConnector"},
        additional_config={"sparse_kv_offload_config": {"enabled": True, **dict(raw)}},
        deployment=deployment or Deployment(),
    )


@pytest.mark.parametrize(
    ("raw", "role", "deployment", "fragment"),
    [
        ({"enabled": "maybe"}, "kv_consumer", Deployment(), "true or false"),
        ({"topk_buffer_size": 1024}, "kv_consumer", Deployment(index_topk=2048), "at least index_topk=2048"),
        ({"topk_buffer_size": 4100}, "kv_consumer", Deployment(block_size=128), "multiple of block_size=128"),
        ({"topk_buffer_size": 0}, "kv_consumer", Deployment(), "at least 1"),
        ({"dram_size_per_dp_GB": 0}, "kv_consumer", Deployment(), "dram_size_per_dp_GB=0"),
        ({"dram_size_per_dp_GB": -1}, "kv_consumer", Deployment(), "dram_size_per_dp_GB=-1"),
        ({}, "kv_producer", Deployment(), "kv_consumer only"),
        ({}, "kv_both", Deployment(), "kv_consumer only"),
        ({}, "kv_consumer", Deployment(pp=2), "pipeline parallelism"),
        ({}, "kv_consumer", Deployment(dcp=2), "context parallelism"),
        ({}, "kv_consumer", Deployment(pcp=2), "context parallelism"),
        ({}, "kv_consumer", Deployment(model_runner=2), "model runner V1"),
        ({}, "kv_consumer", Deployment(compressed_kv=True), "compress"),
        ({}, "kv_consumer", Deployment(index_topk=0), "sparse attention"),
        ({}, "kv_consumer", Deployment(kv_dtype="fp8"), "bfloat16"),
    ],
)
def test_bc_176_sparse_options_that_are_refused(raw, role, deployment, fragment):
    with pytest.raises(OptionError) as caught:
        sparse(raw, role, deployment)
    assert fragment in str(caught.value)


def test_bc_176_sparse_options_that_are_accepted():
    good = Deployment(index_topk=2048, block_size=128, model_type="deepseek_v32", mla=True, kv_dtype="auto", pp=1)
    options = sparse({"topk_buffer_size": "4096", "dram_size_per_dp_GB": "128"}, deployment=good).sparse
    assert (options.topk_buffer_size, options.dram_size_per_dp_gb, options.keep_device_kv_cache) == (4096, 128, False)
    for off in ("false", False, "0", None):
        assert not sparse({"enabled": off}, "kv_producer").sparse.enabled


def test_unvalidated_sparse_models_are_a_warning():
    assert "has not been validated" in sparse(deployment=Deployment(model_type="other")).warnings[0]
    assert sparse(deployment=Deployment(model_type="glm_moe_dsa")).warnings == []


def test_sparse_is_not_available_yet():
    with pytest.raises(NotAvailableError, match="sparse_kv_offload_config: enabled=true"):
        parse({"kv_connector": "ExampleConnector", "kv_role": "kv_consumer"}, additional_config=SPARSE)
    assert parse(POOL, additional_config={"sparse_kv_offload_config": None}).sparse.enabled is False


def test_additional_config_belongs_to_everybody():
    parsed = parse(
        {**POOL, "kv_load_failure_policy": "fail"}, additional_config={"enable_cpu_binding": True, "sparse_kv_offload_conf": {}}
    )
    assert parsed.warnings == [
        "additional_config: unknown key 'sparse_kv_offload_conf' is ignored: did you mean sparse_kv_offload_config?"
    ]
    assert "expected an object" in refused(POOL, additional_config={"sparse_kv_offload_config": 3})
