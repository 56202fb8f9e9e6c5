"""Registration beside a stand-in vllm_ascend, in fresh processes: both plugin orders, with and without KVPOOL_TAKEOVER."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv

from kvpool.core.hits import GroupKind, GroupSpec
from kvpool.engine.groups import pool_groups
from kvpool.engine.setup import check_version

NAMES = ("AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeConnectorV1")
RIVAL = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

class AscendStoreConnector: ...
class MooncakeConnectorStoreV1: ...
class MooncakeConnectorV1: ...

def register():
    for name in ("AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeConnectorV1"):
        KVConnectorFactory.register_connector(name, "vllm_ascend.stand_in", name)

def force():
    for name in ("AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeConnectorV1"):
        KVConnectorFactory._registry.pop(name, None)
    register()
"""
# Importing vLLM takes seconds, so one process does it and forks for each scene: nothing is registered before the fork.
SCRIPT = """
import json, os, sys, traceback
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
from kvpool.engine import plugin
from types import SimpleNamespace
import kvpool.engine.connector, kvpool.engine.p2p.connector  # before the fork, for speed: they register nothing
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
assert "AscendStoreConnector" not in factory._registry

def play(order, takeover, rival):
    if takeover is not None:
        os.environ["KVPOOL_TAKEOVER"] = takeover
    if rival:
        sys.path.insert(0, sys.argv[1])
    for who in order.split(","):
        if who == "ours":
            plugin.register()
        elif who == "theirs":
            import vllm_ascend.stand_in
            vllm_ascend.stand_in.register()
        elif who == "force":
            import vllm_ascend.stand_in
            vllm_ascend.stand_in.force()
        else:
            factory.register_connector(who, "elsewhere", who)
    for name in ("AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeConnectorV1"):
        print("OWNER", name, factory._registry[name]().__module__ if name in factory._registry else None)
    print("OWNER others", "Other" in factory._registry)
    # What a MultiConnector makes of its children.
    child = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both"}
    parent = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child, child]}
    )
    for cls, _ in MultiConnector._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=parent)):
        print("CHILD", cls.__module__)

for number, scene in enumerate(json.loads(sys.stdin.read())):
    if os.fork() == 0:
        file = os.open(f"{sys.argv[1]}/{number}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        try:
            play(*scene)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.wait()
"""
ORDERS = ("ours,theirs", "theirs,ours", "ours,ours,theirs", "ours,theirs,ours", "theirs,ours,ours")
SCENES = [
    ("ours,ours,ours", None, False),
    ("ours", "1", False),
    ("ours,Other,theirs,ours", "1", True),
    ("ours,Other,Other", "1", True),
    ("ours,force", "1", True),
    ("theirs,force,ours,force", "1", True),
    *((order, takeover, True) for order in ORDERS for takeover in (None, "0", "", "1")),
]


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[tuple[str, str | None, bool], str]:
    """What each scene printed and logged."""
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "vllm_ascend").mkdir()
    (folder / "vllm_ascend/__init__.py").touch()
    (folder / "vllm_ascend/stand_in.py").write_text(RIVAL)
    env = {k: v for k, v in os.environ.items() if k != "KVPOOL_TAKEOVER"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, input=json.dumps(SCENES), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return {scene: (folder / f"{i}.log").read_text() for i, scene in enumerate(SCENES)}


def owners(log: str) -> dict[str, str]:
    """Who owns each name after the plugins have registered."""
    return dict(line.split()[1:] for line in log.splitlines() if line.startswith("OWNER"))


OURS = {**dict.fromkeys(NAMES, "kvpool.engine.connector"), "MooncakeConnectorV1": "kvpool.engine.p2p.connector", "others": "False"}
THEIRS = {**dict.fromkeys(NAMES, "vllm_ascend.stand_in"), "others": "False"}


def test_alone_ours_are_registered_however_often_the_plugin_runs(logs):
    assert owners(logs["ours,ours,ours", None, False]) == OURS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("takeover", [None, "0", ""])
def test_beside_a_rival_nothing_is_registered_and_nothing_breaks(logs, order, takeover):
    log = logs[order, takeover, True]
    assert owners(log) == THEIRS
    assert "KVPOOL_TAKEOVER=1" in log, "the operator is told how to change it"


@pytest.mark.parametrize("order", ORDERS)
def test_takeover_makes_ours_win_in_either_order(logs, order):
    log = logs[order, "1", True]
    assert owners(log) == OURS
    assert "KVPOOL_TAKEOVER=1" in log


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("takeover", [None, "1"])
def test_children_of_a_multiconnector_are_of_the_same_kind(logs, order, takeover):
    children = [line.split()[1] for line in logs[order, takeover, True].splitlines() if line.startswith("CHILD")]
    assert children == ["kvpool.engine.connector" if takeover else "vllm_ascend.stand_in"] * 2


@pytest.mark.parametrize("order", ["ours,force", "theirs,force,ours,force"])
def test_takeover_wins_over_a_plugin_that_removes_our_names(logs, order):
    assert owners(logs[order, "1", True]) == OURS


def test_takeover_leaves_other_names_alone(logs):
    assert owners(logs["ours,Other,theirs,ours", "1", True]) == {**OURS, "others": "True"}


def test_a_duplicate_of_another_name_is_still_an_error(logs):
    assert "Connector 'Other' is already registered" in logs["ours,Other,Other", "1", True]


def test_without_a_rival_takeover_changes_nothing(logs):
    assert owners(logs["ours", "1", False]) == OURS


@pytest.mark.parametrize("version", ["0.31.9", "0.29.0", "0.9.1", "unknown", ""])
def test_older_versions_are_refused(version):
    with pytest.raises(RuntimeError, match=r"needs vLLM 0\.32"):
        check_version(version)


@pytest.mark.parametrize(("version", "warned"), [("0.32.0", False), ("0.32.4+cpu", False), ("0.33.0", True), ("1.0.0", True)])
def test_newer_versions_are_accepted_with_a_warning(version, warned, monkeypatch):
    told = []
    monkeypatch.setattr("kvpool.engine.setup.logger.warning_once", lambda *words: told.append(words), raising=False)
    check_version(version)
    assert bool(told) == warned


ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def config(*specs: kv.KVCacheSpec, unit: int | None = 16, **group) -> kv.KVCacheConfig:
    groups = [kv.KVCacheGroupSpec([f"model.layers.{i}.attn"], spec, **group) for i, spec in enumerate(specs)]
    return kv.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=unit)


def test_attention_kinds_become_groups():
    found = pool_groups(
        config(
            kv.FullAttentionSpec(**{**ATTENTION, "block_size": 32}),
            kv.SlidingWindowSpec(**ATTENTION, sliding_window=24),
            kv.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
            kv.MLAAttentionSpec(**{**ATTENTION, "num_kv_heads": 1}),
        )
    )
    assert found == [
        GroupSpec(32, 2, GroupKind.FULL, 0),
        GroupSpec(16, 1, GroupKind.SLIDING, 24),
        GroupSpec(16, 1, GroupKind.CHUNKED, 64),
        GroupSpec(16, 1, GroupKind.FULL, 0),
    ]


def test_layers_of_unequal_width_but_one_kind_are_one_group():
    specs = {"a": kv.FullAttentionSpec(**ATTENTION), "b": kv.FullAttentionSpec(**{**ATTENTION, "head_size": 16})}
    assert pool_groups(config(kv.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))) == [GroupSpec(16, 1)]


def test_a_recurrent_state_is_refused_by_name():
    mamba = kv.MambaSpec(block_size=16, shapes=((2, 4),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match=r"group 1 \(MambaSpec, model.layers.1.attn, ...\) cannot be pooled: a recurrent state"):
        pool_groups(config(kv.FullAttentionSpec(**ATTENTION), mamba))


def test_a_group_that_is_not_transferred_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"group 0 \(FullAttentionSpec, model.layers.0.attn, ...\) cannot be pooled: .* no block hashes"
    ):
        pool_groups(config(kv.FullAttentionSpec(**ATTENTION), enable_kv_transfer=False))


@pytest.mark.parametrize(("sizes", "unit", "fine"), [((128, 128), 128, True), ((128, 640), 128, True), ((64, 96), 64, False)])
def test_bc_033_block_sizes_that_do_not_fit_the_hash_are_refused_with_both_numbers(sizes, unit, fine):
    specs = [kv.FullAttentionSpec(**{**ATTENTION, "block_size": size}) for size in sizes]
    if fine:
        assert [g.units for g in pool_groups(config(*specs, unit=unit))] == [size // unit for size in sizes]
        return
    with pytest.raises(ValueError, match="blocks of 96 tokens, not a multiple of the hash block of 64"):
        pool_groups(config(*specs, unit=unit))


def test_a_configuration_without_a_hash_block_is_refused():
    with pytest.raises(ValueError, match="hash_block_size"):
        pool_groups(config(kv.FullAttentionSpec(**ATTENTION), unit=None))
