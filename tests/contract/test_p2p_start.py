"""What MooncakeConnectorV1 makes of its surroundings at start: ports, hosts, engines, secrets, and what it refuses."""

from __future__ import annotations

import json
import logging
import os

import pytest

from kvpool.engine.p2p.setup import read_pull_setup
from kvpool.options import Deployment, OptionError
from kvpool.options.check import check
from tests.contract.spec import Spec, kv_cache_config, vllm_config

SIZES = {"prefill": {"tp_size": 2, "dp_size": 2}, "decode": {"tp_size": 1, "dp_size": 1}}
HERE = Deployment(tp=2, dp=2, pp=1, device="cpu")


@pytest.fixture
def read(monkeypatch, caplog):
    """``read(extra config, env, dp_index=…, Spec fields…)``; what was logged is in ``read.log()``."""
    for name in ("KVPOOL_SECRET", "VLLM_HOST_IP", "HCCL_IF_IP", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "HCCL_RDMA_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)

    def make(extra=(), env=(), dp_index=0, **fields):
        for name, value in dict({"KVPOOL_SECRET": "a secret of tests"} | dict(env)).items():
            if value is not None:
                monkeypatch.setenv(name, value)
            else:
                monkeypatch.delenv(name, raising=False)
        spec = Spec(**{"role": "kv_producer", "tp": 2, "port": 20001, "pull": {**SIZES, **dict(extra)}} | fields)
        config = vllm_config(spec)
        config.parallel_config.data_parallel_index = dp_index
        return read_pull_setup(config, kv_cache_config(spec), log=True)

    make.log = lambda: caplog.text
    return make


def test_each_data_parallel_rank_has_a_port_of_its_own(read):
    assert [read(dp_index=i).port for i in (0, 1)] == [20001, 20003]
    with pytest.raises(OptionError, match="dp_size=2: but this is data-parallel rank 2"):
        read(dp_index=2)


@pytest.mark.parametrize(
    ("extra", "env", "host", "engine"),
    [
        ({}, {}, "127.0.0.1", "local_host"),
        ({}, {"VLLM_HOST_IP": "127.0.0.1"}, "127.0.0.1", "local_host"),
        ({}, {"VLLM_HOST_IP": "10.0.0.1", "HCCL_IF_IP": "10.0.0.2"}, "10.0.0.1", "mooncake"),
        ({}, {"HCCL_IF_IP": "10.0.0.2"}, "10.0.0.2", "mooncake"),
        ({"transfer_host": "::1"}, {"VLLM_HOST_IP": "10.0.0.1"}, "::1", "local_host"),
        ({"transfer_engine": "process_vm"}, {"VLLM_HOST_IP": "10.0.0.1"}, "10.0.0.1", "process_vm"),
    ],
)
def test_host_and_engine_are_chosen_and_the_reason_is_logged(read, extra, env, host, engine):
    setup = read(extra, env)
    assert (setup.host, setup.engine) == (host, engine)
    assert f"transfers by {engine} ({setup.engine_reason}), prefill side" in read.log()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_wildcard_is_no_place_to_be_found(read, host):
    with pytest.raises(OptionError, match="VLLM_HOST_IP"):
        read(env={"VLLM_HOST_IP": host})


def test_off_loopback_without_a_secret_is_one_warning_or_refused(read):
    env = {"VLLM_HOST_IP": "10.0.0.1", "KVPOOL_SECRET": None}
    assert read(env=env).secret.kind == "none"
    assert read.log().count("KVPOOL_SECRET is not set") == 1
    with pytest.raises(OptionError, match=r"transfer_require_auth=true: needs KVPOOL_SECRET, since 10\.0\.0\.1 is not loopback"):
        read({"transfer_require_auth": True}, env)
    assert read({"transfer_require_auth": True}, {"VLLM_HOST_IP": "10.0.0.1"}).secret.kind == "shared"


@pytest.mark.parametrize(
    ("extra", "env"),
    [
        ({}, {"VLLM_HOST_IP": "0.0.0.0"}),
        ({"transfer_host": "::"}, {}),
        ({}, {"KVPOOL_SECRET": "short"}),
        ({"transfer_require_auth": True}, {"VLLM_HOST_IP": "10.0.0.1", "KVPOOL_SECRET": None}),
        ({}, {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "abc"}),
        ({}, {"HCCL_RDMA_TIMEOUT": "abc"}),
        ({"transfer_engine": "mooncake", "transfer_protocol": "ascend"}, {}),
        ({"transfer_root": "/no/such/folder"}, {}),
    ],
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_the_start_refuses_in_the_words_of_config_check(read, role, extra, env):
    given = {**SIZES, "decode": SIZES["prefill"], **extra}
    with pytest.raises(OptionError) as started:
        read(given, env, role=role)
    with pytest.raises(OptionError) as checked:
        check(_config(role, given), [], os.environ, deployment=HERE)
    assert str(started.value) == str(checked.value)


@pytest.mark.parametrize(
    ("extra", "env"),
    [
        ({}, {"VLLM_HOST_IP": "10.0.0.1", "KVPOOL_SECRET": None}),
        ({"transfer_engine": "local_host", "transfer_protocol": "tcp"}, {}),
        ({"transfer_engine": "process_vm", "transfer_buffer_size": "64MB"}, {}),
        ({"transfer_engine": "mooncake", "transfer_root": "/dev/shm"}, {}),
    ],
)
def test_the_start_warns_in_the_words_of_config_check(read, extra, env):
    setup = read(extra, env)
    checked = check(_config("kv_producer", {**SIZES, **extra}), [], os.environ, deployment=HERE)
    assert len(checked.warnings) == 1
    for line in [*checked.warnings, *checked.notes]:
        assert read.log().count(line) == 1
    assert len(checked.notes) == (setup.engine == "mooncake")


def _config(role, extra):
    return json.dumps(
        {"kv_connector": "MooncakeConnectorV1", "kv_role": role, "kv_port": 20001, "kv_connector_extra_config": extra}
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"role": "kv_both"}, "expected kv_producer or kv_consumer"),
        ({"tp": 1}, "tp_size=2: but this engine runs with 1"),
        ({"port": 65535}, "4 ports are used"),
    ],
)
def test_what_is_refused(read, fields, told):
    with pytest.raises(OptionError, match=told):
        read(**fields)


def test_bc_108_bc_142_a_taken_port_is_an_error_at_start_that_names_it(pair):
    both = pair()
    with pytest.raises(RuntimeError, match=f"kv_port {both.prefill.spec.port}: cannot listen on tcp://127.0.0.1"):
        pair(port=both.prefill.spec.port)
