"""What MooncakeConnectorV1 makes of its options, the environment and the host; its mistakes are in mistake_cases_pull.py."""

from __future__ import annotations

import json

import pytest
from tests.unit.options.mistake_cases import on
from tests.unit.options.mistake_cases_pull import FAR, SECRET, SIDES, told

from kvpool.options import OptionError
from kvpool.options.addresses import is_loopback, is_unspecified
from kvpool.options.check import DEVICE_UNKNOWN, check
from kvpool.options.prefill_decode import read_pull
from kvpool.options.pull_rules import LISTENS, hold_seconds, judge_pull
from kvpool.options.secret import shared_secret

HOLD = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"


def judge(extra=(), env=(), deployment=None, where=""):
    reading = read_pull({**SIDES, **dict(extra)}, "kv_producer", 20001, deployment or on(), where)
    return judge_pull(reading.options, reading.sources, dict(env), deployment or on(), where)


@pytest.mark.parametrize(
    ("extra", "env", "host", "key", "engine"),
    [
        ({}, {}, "127.0.0.1", "", "local_host"),
        ({}, {"VLLM_HOST_IP": ""}, "127.0.0.1", "", "local_host"),
        ({}, {**FAR, "HCCL_IF_IP": "10.0.0.2"}, "10.0.0.1", "VLLM_HOST_IP", "mooncake"),
        ({}, {"HCCL_IF_IP": "10.0.0.2"}, "10.0.0.2", "HCCL_IF_IP", "mooncake"),
        ({"transfer_host": "::1"}, FAR, "::1", "transfer_host", "local_host"),
        ({"transfer_host": "node7"}, FAR, "node7", "transfer_host", "mooncake"),
        ({"transfer_engine": "process_vm"}, FAR, "10.0.0.1", "VLLM_HOST_IP", "process_vm"),
    ],
)
def test_where_prefill_is_found_and_who_moves_the_bytes(extra, env, host, key, engine):
    facts = judge(extra, {**env, **SECRET})
    assert (facts.place, facts.chosen.engine) == ((host, key), engine)
    assert facts.warnings == []
    assert facts.notes == ([LISTENS] if engine == "mooncake" else [])


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "*", "[::]", "::ffff:0.0.0.0"])
def test_nobody_is_found_at_a_wildcard(host):
    with pytest.raises(OptionError) as refused:
        judge(env={"HCCL_IF_IP": host})
    assert str(refused.value).startswith(f'HCCL_IF_IP="{host}": is where decode finds prefill')


@pytest.mark.parametrize(
    ("host", "loopback", "unspecified"),
    [
        ("127.0.0.1", True, False),
        ("127.9.9.9", True, False),
        ("localhost", True, False),
        ("LOCALHOST.", True, False),
        ("::1", True, False),
        ("[::1]", True, False),
        ("::ffff:127.0.0.1", True, False),
        ("10.0.0.1", False, False),
        ("10.0.0.0", False, False),
        ("0.0.0.0", False, True),
        ("node7", False, False),
        ("", False, True),
    ],
)
def test_loopback_and_wildcards(host, loopback, unspecified):
    assert (is_loopback(host), is_unspecified(host)) == (loopback, unspecified)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "86401"])
def test_how_long_prefill_keeps_blocks(value):
    assert hold_seconds({}) == hold_seconds({HOLD: ""}) == 480
    assert hold_seconds({HOLD: "30"}) == 30
    with pytest.raises(OptionError, match=HOLD):
        hold_seconds({HOLD: value})


def test_the_secret_is_long_enough_and_never_shown():
    assert shared_secret({}) is None
    assert shared_secret({"KVPOOL_SECRET": ""}) is None
    assert shared_secret(SECRET) == SECRET["KVPOOL_SECRET"].encode()
    with pytest.raises(OptionError) as refused:
        shared_secret({"KVPOOL_SECRET": "hidden"})
    assert str(refused.value) == 'KVPOOL_SECRET="6 characters": accepted: at least 16 characters'


def test_on_loopback_nothing_needs_a_secret():
    assert judge({"transfer_require_auth": True}).warnings == []


def test_the_guides_configuration_is_valid_on_npus():
    """They know no transfer_protocol, so its default must not be held against them."""
    assert judge(env={**FAR, **SECRET}, deployment=on(device="npu")).warnings == []


def test_options_that_are_read_are_not_said_to_be_in_vain():
    assert judge({"transfer_buffer_size": "1GB", "transfer_root": "/dev/shm"}).warnings == []
    assert judge({"transfer_protocol": "tcp"}, {**FAR, **SECRET}).warnings == []
    (line,) = judge({"transfer_protocol": "tcp"}).warnings
    assert line == "transfer_protocol: no effect with transfer_engine local_host (auto: 127.0.0.1 is this host)"
    (line,) = judge({"transfer_protocol": "tcp", "transfer_engine": "local_host"}).warnings
    assert line == "transfer_protocol: no effect with transfer_engine local_host"


def test_inside_a_multi_connector_lines_say_which_one():
    child = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_port": 20001,
        "kv_connector_extra_config": {**SIDES, "transfer_protocol": "rdma"},
    }
    whole = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [child]},
    }
    where = "connectors[0] MooncakeConnectorV1: "
    assert [line.startswith(f"{where}transfer_protocol") for line in check(json.dumps(whole), [], {}).warnings] == [True]
    child["kv_connector_extra_config"] |= {"transfer_host": "0.0.0.0"}
    with pytest.raises(OptionError) as refused:
        check(json.dumps(whole), [], {})
    assert str(refused.value).startswith(f'{where}transfer_host="0.0.0.0"')


def test_what_was_not_compared_is_said():
    config = json.dumps({"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_connector_extra_config": SIDES})
    assert check(config, [], {**FAR, **SECRET}).notes == [LISTENS, DEVICE_UNKNOWN]
    assert check(config, [], {**FAR, **SECRET}, deployment=on(device="cpu")).notes == [LISTENS]
    assert check(config, [], {}).notes == []


def test_decode_is_judged_too():
    with pytest.raises(OptionError, match=HOLD):
        told({HOLD: "abc"}, on(), role="kv_consumer")
