"""Priorities, resources and hash seeds."""

from __future__ import annotations

import json

import pytest

from kvpool.options import Deployment, OptionError, load_ascend_store
from kvpool.options.environment import MEMCACHE_QOS, RESOURCE_CONFIG, hash_seed, merge_qos
from kvpool.options.prefill_decode import transfer_timeout_ms


def load(qos, backend="local"):
    return load_ascend_store({"backend": backend, "qos_priority": qos}, kv_role="kv_both", env={})


@pytest.mark.parametrize(("value", "qos"), [(0, 0), (4, 4), ("1", 1), (None, None)])
def test_bc_161_accepted_priorities(value, qos):
    assert load(value).options.qos_priority == qos


@pytest.mark.parametrize("value", [-1, 5, 1.0, 1.5, "high", True, ""])
@pytest.mark.parametrize("backend", ["local", "mooncake", "memcache", "yuanrong"])
def test_bc_161_refused_priorities_quote_the_value(value, backend):
    with pytest.raises(OptionError) as caught:
        load(value, backend)
    assert str(caught.value) == f"qos_priority={json.dumps(value)}: expected an integer from 0 to 4"


def test_bc_161_unset_touches_nothing_and_others_say_no_effect():
    for backend in ("local", "mooncake", "memcache", "yuanrong"):
        assert merge_qos(backend, None, {}).updates == {}
        assert merge_qos(backend, None, {}).warnings == []
    for backend in ("local", "yuanrong"):
        assert merge_qos(backend, 2, {}).updates == {}
        assert "no effect" in merge_qos(backend, 2, {}).warnings[0]


def test_priority_keeps_the_other_resources():
    env = {RESOURCE_CONFIG: '{"comm_resource_config.protocol_desc": ["roce:device"]}'}
    assert json.loads(merge_qos("mooncake", 2, env).updates[RESOURCE_CONFIG]) == {
        "comm_resource_config.protocol_desc": ["roce:device"],
        "store.comm_resource_config.qos": 2,
    }
    assert json.loads(merge_qos("mooncake", 0, {}).updates[RESOURCE_CONFIG]) == {"store.comm_resource_config.qos": 0}


def test_priority_of_memcache():
    assert merge_qos("memcache", 3, {}).updates == {MEMCACHE_QOS: "3"}
    assert "wins over" in merge_qos("memcache", 3, {MEMCACHE_QOS: "1"}).warnings[0]
    assert merge_qos("memcache", 3, {MEMCACHE_QOS: "3"}).warnings == []


@pytest.mark.parametrize("value", ['{comm_resource_config.protocol_desc: ["roce:device"]}', "", "[]", '"x"', '{"a": 1,}'])
def test_bc_163_broken_resources(value):
    env = {RESOURCE_CONFIG: value}
    with pytest.raises(OptionError, match=rf"{RESOURCE_CONFIG}=.*line 1 column \d+"):
        merge_qos("mooncake", 1, env)
    merged = merge_qos("mooncake", None, env)
    assert merged.updates == {}
    assert len(merged.warnings) == 1
    assert "left as it is" in merged.warnings[0]


@pytest.mark.parametrize(
    ("algo", "seed", "warned"),
    [
        (None, None, False),
        ("sha256", None, False),
        ("sha256_cbor", None, False),
        ("xxhash", None, True),
        ("xxhash_cbor", None, True),
        ("xxhash", "0", False),
    ],
)
def test_bc_009_a_seed_is_asked_for_only_where_hashes_are_random(algo, seed, warned):
    env = {"PYTHONHASHSEED": seed} if seed is not None else {}
    loaded = load_ascend_store({"backend": "local"}, kv_role="kv_both", env=env, deployment=Deployment(hash_algo=algo))
    assert any("PYTHONHASHSEED" in line for line in loaded.warnings) is warned


def test_bc_009_the_seed_is_shown():
    assert hash_seed({"PYTHONHASHSEED": "0"}) == "PYTHONHASHSEED=0"
    assert hash_seed({}) == "PYTHONHASHSEED unset"


def test_transfer_timeout():
    assert transfer_timeout_ms({}) == 4096 * 2**20 * 7 // 1_000_000 + 3000
    assert transfer_timeout_ms({"ASCEND_TRANSFER_TIMEOUT": "5000"}) == 5000
    with pytest.raises(OptionError, match="ASCEND_TRANSFER_TIMEOUT"):
        transfer_timeout_ms({"ASCEND_TRANSFER_TIMEOUT": "long"})
    with pytest.raises(OptionError, match="HCCL_RDMA_RETRY_CNT"):
        transfer_timeout_ms({"HCCL_RDMA_RETRY_CNT": "0"})
