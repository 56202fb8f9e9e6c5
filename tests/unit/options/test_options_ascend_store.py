"""kv_connector_extra_config of AscendStoreConnector: keys, defaults, dependencies, and what is still to come."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvpool.options import AscendStoreOptions, Deployment, NotAvailableError, OptionError, load_ascend_store
from kvpool.options.ascend_rules import shares_buffers
from kvpool.options.load import read_ascend_store


def load(extra=(), role="kv_both", env=None, deployment=None, policy=None):
    return load_ascend_store(
        {"backend": "local", **dict(extra)},
        kv_role=role,
        env=env or {},
        deployment=deployment or Deployment(),
        kv_load_failure_policy=policy,
    )


def refused(extra, **kwargs):
    with pytest.raises(OptionError) as caught:
        load(extra, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_need_no_warning():
    loaded = load()
    assert loaded.warnings == []
    assert loaded.options == AscendStoreOptions(backend_reason="set by the key backend")
    assert set(loaded.sources) == set(AscendStoreOptions.model_fields)
    assert loaded.sources["backend"] == "JSON"
    assert loaded.sources["lease_ms"] == "default"


def test_documented_defaults():
    options = AscendStoreOptions()
    assert (options.load_async, options.consumer_is_to_put, options.consumer_is_to_load, options.use_layerwise) == (False,) * 4
    assert (options.lookup_wait_ms, options.lookup_timeout_ms, options.load_timeout_ms, options.save_timeout_ms) == (
        2,
        1000,
        30000,
        30000,
    )
    assert (options.lease_ms, options.breaker_failures, options.breaker_cooldown_ms, options.max_pinned_save_percent) == (
        60000,
        5,
        5000,
        10,
    )
    assert (options.zero_hit_alarm_lookups, options.negative_cache_entries, options.negative_cache_ms) == (100, 65536, 30000)
    assert (options.local_pool_name, options.local_pool_root, options.local_dram_size) == ("default", None, 4 << 30)
    assert (options.local_on_last_close, options.min_hit_tokens, options.cache_namespace) == ("keep", 0, None)
    assert options.fault_plan_path is None


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        AscendStoreOptions().backend = "mooncake"


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("backend", " LOCAL ", "local"),
        ("lookup_rpc_port", "0", "0"),
        ("lookup_rpc_port", 7, 7),
        ("load_async", "true", True),
        ("local_dram_size", "1.5GB", 3 << 29),
        ("local_on_last_close", "Remove", "remove"),
        ("prefill_pp_size", None, 1),
        ("zero_hit_alarm_lookups", "0", 0),
        ("max_pinned_save_percent", 90, 90),
        ("layerwise_independent_layers", "all", "all"),
        ("layerwise_independent_layers", [0, -1], (0, -1)),
        ("layerwise_num_shared_buffers", "3", 3),
        ("cache_namespace", "team-a_1.0", "team-a_1.0"),
    ],
)
def test_accepted_values(key, value, parsed):
    assert getattr(load({key: value}).options, key) == parsed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "redis"),
        ("backend", 3),
        ("lookup_rpc_port", True),
        ("lookup_rpc_port", [1]),
        ("load_async", "maybe"),
        ("consumer_is_to_put", []),
        ("use_layerwise", 2),
        ("prefill_pp_size", 0),
        ("prefill_tp_size", "many"),
        ("decode_tp_size", -1),
        ("layerwise_num_shared_buffers", 0),
        ("layerwise_num_shared_buffers", True),
        ("layerwise_independent_layers", "0"),
        ("layerwise_independent_layers", [True]),
        ("layerwise_prefetch_layers", 0),
        ("h2d_stagger_us", -1),
        ("ascend_local_comm_res_path", "relative"),
        ("cache_namespace", "a/b"),
        ("min_hit_tokens", -1),
        ("local_pool_name", ".."),
        ("local_pool_root", "pools"),
        ("local_dram_size", "1G"),
        ("local_dram_size", "0"),
        ("local_on_last_close", "forget"),
        ("lookup_wait_ms", 1001),
        ("lease_ms", 0),
        ("breaker_failures", 0),
        ("max_pinned_save_percent", 91),
        ("max_pinned_save_percent", 0),
        ("zero_hit_alarm_lookups", -1),
        ("negative_cache_entries", 1.0),
        ("fault_plan_path", ""),
    ],
)
def test_wrong_values_name_key_value_and_form(key, value):
    message = refused({key: value})
    assert message.startswith(f"{key}=")
    assert ": expected " in message


def test_unknown_key_is_one_warning_with_the_nearest():
    assert load({"lookup_rpc_prot": "0"}).warnings == ["unknown key 'lookup_rpc_prot' is ignored: did you mean lookup_rpc_port?"]
    assert len(load({"zzz": 1}).warnings) == 1


def test_results_are_not_keys():
    assert len(load({"backend_reason": "mine"}).warnings) == 1


def test_old_name_of_the_port_label():
    loaded = load({"mooncake_rpc_port": "5"})
    assert loaded.options.lookup_rpc_port == "5"
    assert loaded.warnings == ["mooncake_rpc_port is deprecated: use lookup_rpc_port"]
    loaded = load({"mooncake_rpc_port": "5", "lookup_rpc_port": "6"})
    assert loaded.options.lookup_rpc_port == "6"
    assert "ignored" in loaded.warnings[0]


PUTS = {"consumer_is_to_put": True}


@pytest.mark.parametrize(
    ("extra", "role", "fragment"),
    [
        ({"discard_partial_chunks": False}, "kv_both", "discard_partial_chunks has no effect"),
        ({"h2d_stagger_us": 5}, "kv_both", "h2d_stagger_us has no effect"),
        ({"ascend_local_comm_res_path": "/x"}, "kv_both", "no effect with the local backend"),
        ({"consumer_is_to_put": True}, "kv_producer", "consumer_is_to_put has no effect on a kv_producer"),
        ({"consumer_is_to_load": True}, "kv_both", "consumer_is_to_load has no effect on a kv_both"),
        ({"save_decode_cache": True, "consumer_is_to_load": True}, "kv_consumer", "save_decode_cache has no effect"),
        ({}, "kv_consumer", "neither loads from the pool nor stores"),
        ({"prefill_pp_size": 2}, "kv_both", "no effect without consumer_is_to_put"),
        ({"prefill_tp_size": 4, "decode_tp_size": 2}, "kv_both", "share nothing"),
        ({"prefill_tp_size": 4}, "kv_both", "no effect without consumer_is_to_put"),
        ({"decode_tp_size": 4, "consumer_is_to_load": True}, "kv_consumer", "no effect without consumer_is_to_put"),
        ({"decode_tp_size": 4, "consumer_is_to_put": True}, "kv_consumer", "no effect without prefill_tp_size"),
        ({"fault_plan_path": "/srv/faults"}, "kv_both", "for tests only"),
        ({"qos_priority": 1}, "kv_both", "no effect with the local backend"),
        ({"layerwise_num_shared_buffers": 3}, "kv_both", "no effect without use_layerwise"),
    ],
)
def test_options_without_effect_are_one_warning(extra, role, fragment):
    warnings = load(extra, role=role).warnings
    assert len(warnings) == 1
    assert fragment in warnings[0]


@pytest.mark.parametrize(
    ("role", "extra", "fragment"),
    [
        ("kv_producer", {"prefill_tp_size": 4, "decode_tp_size": 4}, "prefill_tp_size=4, but this engine runs with a tensor"),
        (
            "kv_consumer",
            {**PUTS, "prefill_tp_size": 4, "decode_tp_size": 4},
            "decode_tp_size=4, but this engine runs with a tensor",
        ),
    ],
)
def test_sizes_that_are_not_those_of_the_engine(role, extra, fragment):
    def warnings(tp):
        return read_ascend_store({"backend": "local", **extra}, kv_role=role, env={}, deployment=Deployment(tp=tp)).warnings

    assert any(fragment in line for line in warnings(2))
    assert not any(fragment in line for line in warnings(4))


def test_a_pool_of_one_host_is_not_shared_by_several():
    def warnings(hosts):
        return read_ascend_store({"backend": "local"}, kv_role="kv_both", env={}, deployment=Deployment(hosts=hosts)).warnings

    assert "2 hosts have one each" in warnings(2)[0]
    assert warnings(1) == []


@pytest.mark.parametrize("role", ["", "both", None, 1, "KV_BOTH"])
def test_role_is_required(role):
    with pytest.raises(OptionError, match="kv_role"):
        load(role=role)


@pytest.mark.parametrize("policy", ["retry", "", "Recompute"])
def test_bc_006_policy_is_recompute_or_fail(policy):
    assert "kv_load_failure_policy" in refused({}, policy=policy)


def test_times_that_contradict():
    assert "load_timeout_ms=30000" in refused({"lease_ms": 30000})
    assert "lookup_timeout_ms=1" in refused({"lookup_timeout_ms": 1})


def test_bc_021_partition_agrees_with_size_and_layers():
    both = {"prefill_pp_size": 2, "prefill_pp_layer_partition": "30,31"}
    known = Deployment(num_layers=61)
    loaded = read_ascend_store({"backend": "local", **PUTS, **both}, kv_role="kv_consumer", env={}, deployment=known)
    assert loaded.options.prefill_pp_layer_partition == (30, 31)
    assert "adds up to 60" in refused({**both, "prefill_pp_layer_partition": "30,30"}, deployment=known)
    assert "names 1 stages" in refused({**both, "prefill_pp_layer_partition": "31"})
    assert "expected" in refused({**both, "prefill_pp_layer_partition": "30,31,0"})
    assert "expected" in refused({**both, "prefill_pp_layer_partition": "a,b"})


def test_partition_alone_gives_the_size():
    loaded = read_ascend_store({"backend": "local", "prefill_pp_layer_partition": "30,31"}, kv_role="kv_both", env={})
    assert loaded.options.prefill_pp_size == 2
    assert loaded.sources["prefill_pp_size"] == "JSON (from prefill_pp_layer_partition)"


@pytest.mark.parametrize(
    ("extra", "role", "deployment"),
    [
        ({"use_layerwise": True}, "kv_producer", Deployment()),
        ({"use_layerwise": "1"}, "kv_both", Deployment(eager=False)),
    ],
)
def test_later_work_is_refused_as_not_available(extra, role, deployment):
    with pytest.raises(NotAvailableError, match="is not available yet"):
        load(extra, role=role, deployment=deployment)


@pytest.mark.parametrize("sizes", [{"prefill_tp_size": 2}, {"prefill_pp_size": 2}, {"prefill_tp_size": 4, "decode_tp_size": 2}])
def test_a_consumer_may_store_for_a_prefill_side_of_other_sizes(sizes):
    loaded = load({**PUTS, **sizes}, role="kv_consumer", deployment=Deployment(tp=2))
    assert loaded.options.consumer_is_to_put
    assert not any("share nothing" in line for line in loaded.warnings)


LAYERWISE = {"use_layerwise": True}
SHARED = {**LAYERWISE, "layerwise_num_shared_buffers": 3}


@pytest.mark.parametrize(
    ("extra", "role", "deployment", "fragment"),
    [
        (LAYERWISE, "kv_consumer", Deployment(), "kv_producer or kv_both only"),
        (LAYERWISE, "kv_producer", Deployment(pcp=2), "context parallelism"),
        (LAYERWISE, "kv_producer", Deployment(dcp=2), "context parallelism"),
        ({**LAYERWISE, "prefill_tp_size": 4, "decode_tp_size": 2}, "kv_producer", Deployment(), "differs from decode_tp_size"),
        ({**SHARED, "layerwise_num_shared_buffers": 0}, "kv_producer", Deployment(), "expected an integer of at least 1"),
        ({**SHARED, "layerwise_num_shared_buffers": -1}, "kv_producer", Deployment(), "expected an integer of at least 1"),
        ({**SHARED, "layerwise_independent_layers": [99]}, "kv_producer", Deployment(num_layers=61), "the model has 61 layers"),
        ({**SHARED, "layerwise_independent_layers": "0"}, "kv_producer", Deployment(), "expected a list"),
        (SHARED, "kv_both", Deployment(), "kv_producer only"),
        (SHARED, "kv_producer", Deployment(eager=False), "--enforce-eager"),
        (SHARED, "kv_producer", Deployment(mla=False), "MLA"),
    ],
)
def test_bc_172_excluded_combinations(extra, role, deployment, fragment):
    message = refused(extra, role=role, deployment=deployment)
    assert fragment in message
    assert "not available" not in message


@pytest.mark.parametrize("layers", [[0], "all", [], [0, -1]])
@pytest.mark.parametrize("buffers", [None, 1, 3, "3"])
@pytest.mark.parametrize("backend", ["local", "mooncake", "memcache"])
def test_bc_172_supported_combinations(layers, buffers, backend, tmp_path):
    (tmp_path / "mooncake.json").write_text('{"master_server_address": "127.0.0.1:1"}')
    (tmp_path / "mmc.conf").write_text("ock.mmc.meta_service_url = tcp://h:1\nock.mmc.local_service.config_store_url = tcp://h:2\n")
    env = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "mooncake.json"), "MMC_LOCAL_CONFIG_PATH": str(tmp_path / "mmc.conf")}
    extra = {"backend": backend, **LAYERWISE, "layerwise_num_shared_buffers": buffers, "layerwise_independent_layers": layers}
    deployment = Deployment(eager=True, num_layers=61, mla=True)
    loaded = read_ascend_store(extra, kv_role="kv_producer", env=env, deployment=deployment)
    assert loaded.warnings == []
    assert shares_buffers(loaded.options, deployment) == (buffers is not None and layers != "all")


def test_bc_172_store_that_cannot_go_layer_by_layer():
    with pytest.raises(OptionError, match="local, mooncake, memcache"):
        load({"backend": "yuanrong", **LAYERWISE}, role="kv_producer", env={"DS_WORKER_ADDR": "h:1"})


def test_more_buffers_than_layers_share_nothing():
    loaded = read_ascend_store({"backend": "local", **SHARED}, kv_role="kv_both", env={}, deployment=Deployment(num_layers=4))
    assert not shares_buffers(loaded.options, Deployment(num_layers=4))


def test_hybrid_models_load_in_the_background_and_only_a_written_false_is_a_warning():
    hybrid = Deployment(hybrid=True)
    assert load(deployment=hybrid).warnings == []
    assert load({"load_async": True}, deployment=hybrid).warnings == []
    assert "always load in the background" in load({"load_async": False}, deployment=hybrid).warnings[0]


def test_load_async_with_layerwise_is_a_warning():
    loaded = read_ascend_store({"backend": "local", **LAYERWISE, "load_async": True}, kv_role="kv_both", env={})
    assert loaded.warnings == ["load_async has no effect with use_layerwise"]


@pytest.mark.parametrize("key", ["use_layerwise", "load_async", "consumer_is_to_put"])
@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("False", False),
        ("0", False),
        ("1", True),
        (0, False),
        (1, True),
        (None, False),
    ],
)
def test_bc_005_switches_of_the_connector(key, value, meaning):
    loaded = read_ascend_store({"backend": "local", key: value}, kv_role="kv_producer", env={})
    assert getattr(loaded.options, key) is meaning
