"""How each mistake in configuring MooncakeConnectorV1 is made; see mistake_cases.py."""

from __future__ import annotations

import json

from tests.unit.options.mistake_cases import Case, on

from kvpool.options import Deployment
from kvpool.options.check import check

SIDES = {"prefill": {"tp_size": 2, "dp_size": 1}, "decode": {"tp_size": 2, "dp_size": 1}}
FAR = {"VLLM_HOST_IP": "10.0.0.1"}
SECRET = {"KVPOOL_SECRET": "sixteen letters."}
HOLD, RDMA = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "HCCL_RDMA_TIMEOUT"


def told(env, deployment, *, role="kv_producer", port=20001, **extra):
    connector = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": {**SIDES, **extra},
    }
    return check(json.dumps(connector), [], env, deployment=deployment).warnings


def pull(env=None, deployment=None, **given):
    """`config check` of one side; ``given``: role, port, and extra config."""
    return lambda _: told(env or {}, deployment or on(), **given)


def tp(prefill, decode):
    return {"prefill": {"tp_size": prefill, "dp_size": 1}, "decode": {"tp_size": decode, "dp_size": 1}}


def stages(partition):
    return {"prefill": {**SIDES["prefill"], "pp_size": 2, "pp_layer_partition": partition}}


SIZES = [
    Case("is required: an object with tp_size and dp_size", pull(decode=None), pull()),
    Case("must be a multiple of the decode side's", pull(**tp(1, 2)), pull(**tp(2, 1))),
    Case("must be 1 on the decode side", pull(decode={**SIDES["decode"], "pp_size": 2}), pull()),
    Case("stages, but pp_size is", pull(**stages("8")), pull(**stages("4,4"))),
    Case("but this engine runs with", pull(deployment=on(tp=4)), pull(deployment=on(tp=2))),
    Case("ports are used from there on", pull(port=65535), pull(port=65534)),
    Case("expected kv_producer or kv_consumer", pull(role="kv_both"), pull(role="kv_consumer")),
]

SURROUNDINGS = [
    Case(
        "is where decode finds prefill: expected an address of this host",
        pull({"VLLM_HOST_IP": "0.0.0.0"}),
        pull({"VLLM_HOST_IP": "0.0.0.0"}, transfer_host="127.0.0.1"),
    ),
    Case("but there are 2 hosts", pull(deployment=on(hosts=2)), pull(FAR | SECRET, on(hosts=2))),
    Case("and KVPOOL_SECRET is not set: whoever reaches this host", pull(FAR), pull(FAR | SECRET)),
    Case("needs KVPOOL_SECRET, since", pull(FAR, transfer_require_auth=True), pull(FAR | SECRET, transfer_require_auth=True)),
    Case("accepted: at least 16 characters", pull({"KVPOOL_SECRET": "fifteen letters"}), pull(SECRET)),
    Case(f'{HOLD}="abc": expected', pull({HOLD: "abc"}), pull({HOLD: "600"})),
    Case(f'{RDMA}="abc": expected', pull({RDMA: "abc"}), pull({RDMA: "17"})),
]

ENGINE = [
    Case(
        'transfer_protocol="ascend": needs an NPU, but the KV lies on cpu',
        pull(FAR | SECRET, on(device="cpu"), transfer_protocol="ascend"),
        pull(FAR | SECRET, on(device="cpu"), transfer_protocol="tcp"),
    ),
    Case(
        "transfer_protocol=rdma: this host shows no RDMA device",
        pull(FAR | SECRET, on(device="cpu", rdma=0), transfer_protocol="rdma"),
        pull(FAR | SECRET, on(device="cpu"), transfer_protocol="rdma"),
    ),
    Case(
        "reaches host memory only, but the KV lies on npu",
        pull(deployment=on(device="npu"), transfer_engine="process_vm"),
        pull(deployment=on(device="cpu"), transfer_engine="process_vm"),
    ),
    Case(
        "is no folder of this host: make it, or leave it out",
        lambda folder: told({}, Deployment(), transfer_root=str(folder / "missing")),
        lambda folder: told({}, Deployment(), transfer_root=str(folder)),
    ),
    Case(
        "transfer_protocol: no effect with transfer_engine",
        pull(transfer_engine="local_host", transfer_protocol="rdma"),
        pull(transfer_engine="mooncake", transfer_protocol="rdma"),
    ),
    Case(
        "transfer_buffer_size, transfer_root: no effect with transfer_engine",
        pull(transfer_engine="process_vm", transfer_buffer_size="1GB", transfer_root="/dev/shm"),
        pull(transfer_buffer_size="1GB", transfer_root="/dev/shm"),
    ),
]

AREAS = {"MooncakeConnectorV1": SIZES + SURROUNDINGS + ENGINE}
