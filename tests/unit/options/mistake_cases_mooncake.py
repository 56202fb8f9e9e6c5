"""How each mistake in configuring Mooncake is made; see mistake_cases.py."""

from __future__ import annotations

import json
from unittest.mock import patch

from tests.unit.options.mistake_cases import GIB, LOCAL, MASTER, WORKER, Case, checked, mooncake, on, pool

from kvpool.options.check import check
from kvpool.options.environment import RESOURCE_CONFIG
from kvpool.options.mooncake_ssd import BUCKET, BUFFER, CLIENT_TTL, HEARTBEAT, LIMIT, POLICY, QUOTA

FABRIC = {"ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
TEXT = json.dumps(MASTER)
SMALL = {LIMIT: "1", QUOTA: "1", POLICY: "lru"}


FILE = [
    Case(
        "needs an NPU, but the KV lies on cpu",
        lambda _: mooncake({}, {}, on(device="cpu")),
        lambda _: mooncake({"protocol": "tcp"}, {}, on(device="cpu")),
    ),
    Case(
        "cannot reach the memory of an NPU",
        lambda _: mooncake({"protocol": "tcp"}, {}, on(device="npu")),
        lambda _: mooncake({}, {}, on(device="npu")),
    ),
    Case(
        "protocol=rdma: this host shows no RDMA device",
        lambda _: mooncake({"protocol": "rdma"}, {}, on(device="cpu", rdma=0)),
        lambda _: mooncake({"protocol": "rdma"}, {}, on(device="cpu")),
    ),
    Case(
        'expected "P2PHANDSHAKE": engines find each other without a metadata server',
        lambda _: mooncake({"metadata_server": "etcd://10.0.0.1:2379"}),
        lambda _: mooncake({"metadata_server": "P2PHANDSHAKE"}),
    ),
    Case(
        "has no effect with protocol ascend: leave it empty",
        lambda _: mooncake({"device_name": "mlx5_0"}),
        lambda _: mooncake({"device_name": "mlx5_0", "protocol": "rdma"}),
    ),
    Case(
        "master_server_address=null: is required",
        lambda _: mooncake({"master_server_address": None}),
        lambda _: mooncake({"master_server_address": None}, {"MOONCAKE_MASTER": "h:1"}),
    ),
    Case(
        "master_server_address: MOONCAKE_MASTER wins",
        lambda _: mooncake({}, {"MOONCAKE_MASTER": "h:1"}),
        lambda _: mooncake({}, {"MOONCAKE_MASTER": MASTER["master_server_address"]}),
    ),
    Case(
        "global_segment_size: MOONCAKE_GLOBAL_SEGMENT_SIZE wins",
        lambda _: mooncake({"global_segment_size": "2GB"}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "3GB"}),
        lambda _: mooncake({"global_segment_size": "2GB"}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "2048MB"}),
    ),
    Case(
        "is reached from one host only, but 2 hosts share the pool",
        lambda _: mooncake({"master_server_address": "localhost:1"}, {}, on(hosts=2)),
        lambda _: mooncake({}, {}, on(hosts=2)),
    ),
    Case(
        "is not a multiple of 1GB, which fabric memory needs",
        lambda _: mooncake({"global_segment_size": "1.5GB"}, FABRIC),
        lambda _: mooncake({"global_segment_size": "2GB"}, FABRIC),
    ),
    Case(
        "global_segment_size=1610612736 is not a multiple of 1GB",
        lambda _: mooncake({"global_segment_size": "1.5GB"}),
        lambda _: mooncake({"global_segment_size": "1.5GB", "protocol": "tcp"}),
    ),
    Case(
        "has no effect: only 1 switches fabric memory on",
        lambda _: mooncake({}, {"ASCEND_ENABLE_USE_FABRIC_MEM": "true"}),
        lambda _: mooncake({}, FABRIC),
    ),
    Case(
        "ASCEND_ENABLE_USE_FABRIC_MEM=1 is for the A3 series",
        lambda _: mooncake({}, FABRIC, on(device="npu", hardware="A2")),
        lambda _: mooncake({}, FABRIC, on(device="npu", hardware="A3")),
    ),
    Case(
        "ASCEND_ENABLE_USE_FABRIC_MEM=1 has no effect with protocol tcp",
        lambda _: mooncake({"protocol": "tcp"}, FABRIC),
        lambda _: mooncake({"protocol": "tcp"}, {"ASCEND_ENABLE_USE_FABRIC_MEM": "0"}),
    ),
    Case(
        "HCCL_INTRA_ROCE_ENABLE is not 1",
        lambda _: mooncake({}, {}, on(hardware="A2")),
        lambda _: mooncake({}, {"HCCL_INTRA_ROCE_ENABLE": "1"}, on(hardware="A2")),
    ),
    Case(
        "is set: the A5 series needs one of them",
        lambda _: mooncake({}, {}, on(hardware="A5")),
        lambda _: mooncake({}, {"ASCEND_LOCAL_COMM_RES": '{"version":"1.3"}'}, on(hardware="A5")),
    ),
    Case(
        "of ASCEND_GLOBAL_RESOURCE_CONFIG is less than global_segment_size",
        lambda _: mooncake({"global_segment_size": "33GB"}, FABRIC | {RESOURCE_CONFIG: '{"fabric_memory.max_capacity": 32}'}),
        lambda _: mooncake({"global_segment_size": "30GB"}, FABRIC | {RESOURCE_CONFIG: '{"fabric_memory.max_capacity": 32}'}),
    ),
    Case(
        "GB for the pool (segment, buffers), but",
        lambda _: mooncake({}, {}, on(local_ranks=8, memory=15 * GIB)),
        lambda _: mooncake({}, {}, on(local_ranks=8, memory=16 * GIB)),
    ),
    Case("tenant_id=7: expected a string", lambda _: mooncake({"tenant_id": 7}), lambda _: mooncake({"tenant_id": "7"})),
]


def resources(value, backend="mooncake", env=(), **options):
    env = dict(env) if value is None else {RESOURCE_CONFIG: value}
    text = {"mooncake": TEXT, "memcache": LOCAL, "yuanrong": json.dumps(WORKER)}[backend]
    return lambda folder: pool(folder, backend, text, env=env, **options)


ROCE = '{"comm_resource_config.protocol_desc": ["roce:device"], "fabric_memory.max_capacity": 32}'
RESOURCES = [
    Case("is not a JSON object: line 1 column 2", resources("{a: 1}", qos_priority=1), resources(ROCE, qos_priority=1)),
    Case("it is left as it is", resources("{a: 1}"), resources(ROCE)),
    Case(
        "qos_priority=1 wins over store.comm_resource_config.qos=3",
        resources('{"store.comm_resource_config.qos": 3}', qos_priority=1),
        resources('{"store.comm_resource_config.qos": 1}', qos_priority=1),
    ),
    Case(
        "qos_priority=1 wins over MF_DEVICE_UB_QOS=3",
        resources(None, "memcache", {"MF_DEVICE_UB_QOS": "3"}, qos_priority=1),
        resources(None, "memcache", {"MF_DEVICE_UB_QOS": "1"}, qos_priority=1),
    ),
    Case(
        "has no effect with the yuanrong backend",
        resources(None, "yuanrong", qos_priority=1),
        resources(None, "yuanrong"),
    ),
    Case(
        'expected a list of "<protocol>:device" or "<protocol>:host"',
        resources('{"comm_resource_config.protocol_desc": "roce:device"}'),
        resources(ROCE),
    ),
    Case(
        'ASCEND_GLOBAL_RESOURCE_CONFIG: fabric_memory.max_capacity="32GB": expected an integer of at least 1',
        resources('{"fabric_memory.max_capacity": "32GB"}'),
        resources(ROCE),
    ),
    Case(
        "goes to HIXL unchecked: did you mean store.comm_resource_config.protocol_desc?",
        resources('{"store.comm_resource_config.protocol_des": ["roce:device"]}'),
        resources('{"store.comm_resource_config.protocol_desc": ["roce:device"], "of.others": 1}'),
    ),
    Case(
        "expected an integer from 1 to 3600000 (milliseconds)",
        resources(None, env={"ASCEND_CONNECT_TIMEOUT": "10s"}),
        resources(None, env={"ASCEND_CONNECT_TIMEOUT": "10000"}),
    ),
]


def disk(path=None, env=(), deployment=None):
    """``path`` in the folder, and what else the environment says; the disk tier is on."""

    def read(folder):
        (folder / "file").touch()
        (folder / "real").mkdir()
        (folder / "link").symlink_to(folder / "real")
        raw = {"enable_ssd_offload": True, "ssd_offload_path": path(folder) if path else str(folder / "real")}
        return mooncake(raw, SMALL | dict(env), deployment)

    return read


RIGHT = disk()


def read_only(folder):
    with patch("os.access", return_value=False):
        return RIGHT(folder)


DISK = [
    Case("is required with enable_ssd_offload", disk(lambda _: None), RIGHT),
    Case("is not absolute", disk(lambda _: "real"), RIGHT),
    Case("must not contain ..", disk(lambda folder: f"{folder}/real/../real"), RIGHT),
    Case("is or passes through a symbolic link", disk(lambda folder: f"{folder}/link"), RIGHT),
    Case("does not exist", disk(lambda folder: f"{folder}/missing"), RIGHT),
    Case("is not a directory", disk(lambda folder: f"{folder}/file"), RIGHT),
    Case("is not writable", read_only, RIGHT),
    Case(
        "expected bytes in digits only; Mooncake ignores units silently: set 10737418240",
        disk(env={BUFFER: "10GB"}),
        disk(env={BUFFER: "10737418240"}),
    ),
    Case(
        "expected bytes in digits only; Mooncake ignores units silently: set 33554432",
        disk(env={BUCKET: "32MB"}),
        disk(env={BUCKET: "33554432"}),
    ),
    Case("a bucket of no bytes is refused by Mooncake, late", disk(env={BUCKET: "0"}), disk(env={BUCKET: "1"})),
    Case(
        "expected seconds in digits only, at least 1; Mooncake ignores units silently: set 1",
        disk(env={HEARTBEAT: "1s"}),
        disk(env={HEARTBEAT: "1"}),
    ),
    Case(
        "expected seconds from 0 to 600, the --client_ttl of the master",
        disk(env={CLIENT_TTL: "abc"}),
        disk(env={CLIENT_TTL: "10"}),
    ),
    Case(
        "is not a multiple of 1GB, which fabric memory needs: set 2147483648",
        disk(env=FABRIC),
        disk(env={**FABRIC, BUFFER: "2147483648"}),
    ),
    Case("expected none, fifo or lru", disk(env={POLICY: "random"}), RIGHT),
    Case("MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY is none", disk(env={POLICY: "none"}), RIGHT),
    Case("GB of the disk; writes fail when it is full although monitoring shows room", disk(env={LIMIT: str(1 << 60)}), RIGHT),
    Case("ranks share the disk of", disk(env={QUOTA: "0"}, deployment=on(tp=8)), RIGHT),
]


def master(flags, raw=(), **given):
    """`config check` of a mooncake.json with the command of the master; POLICY stands for a policy file."""

    def read(folder):
        (folder / "policy.yaml").write_text("version: 1\n\ntenants:\n  - name: team-a\n    quota: 200GB\n  - name: default\n")
        (folder / "disk").mkdir()
        entries = {**MASTER, **dict(raw)}
        if entries.get("enable_ssd_offload"):
            entries["ssd_offload_path"] = str(folder / "disk")
        services = [f"mooncake_master {flags}".replace("POLICY", str(folder / "policy.yaml"))]
        return checked(folder, {"mooncake.json": json.dumps(entries)}, services=services, **given)

    return read


def deadline(milliseconds):
    """The same with a connector that gives up its loads after some time, and a lease of 11 s."""

    def read(folder):
        (folder / "mooncake.json").write_text(TEXT)
        extra = {"backend": "mooncake", "load_timeout_ms": milliseconds}
        transfer = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        env = {"MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json")}
        services = ["mooncake_master --port 50088 --default_kv_lease_ttl 11000"]
        return check(json.dumps(transfer), [], env, deployment=on(), services=services).warnings

    return read


SSD = {"enable_ssd_offload": True}
STRICT = "--port 50088 --enable_multi_tenants=true --tenant_quota_connector_type=file --tenant_quota_connector_uri=POLICY"
FITS = master("--port 50088 --default_kv_lease_ttl 11000")
MASTER_FLAGS = [
    Case("but the master listens on port", master("--port 50051"), FITS),
    Case(
        "but the master runs with --enable_offload=false",
        master("--port 50088 --enable_offload=false", SSD, env=SMALL),
        master("--port 50088 --enable_offload=true", SSD, env=SMALL),
    ),
    Case(
        "a switch is on wherever it stands",
        master("--port 50088 --enable_offload false"),
        master("--port 50088 --enable_offload=false"),
    ),
    Case(
        "expected milliseconds, or a number with ms, s, m or h",
        master("--port 50088 --default_kv_lease_ttl 11sec"),
        master("--port 50088 --default_kv_lease_ttl 11s"),
    ),
    Case(
        "are not read: give them in the command",
        master("--port 50088 --config_path master.yaml"),
        master("--rpc_port 50088 --port 50051"),
    ),
    Case(
        "must be larger than ASCEND_TRANSFER_TIMEOUT=",
        master("--port 50088 --default_kv_lease_ttl 11000", env={"ASCEND_TRANSFER_TIMEOUT": "11000"}),
        master("--port 50088 --default_kv_lease_ttl 11000", env={"ASCEND_TRANSFER_TIMEOUT": "10000"}),
    ),
    Case("ms is not longer than load_timeout_ms=", deadline(30000), deadline(10000)),
    Case(
        "ms while ASCEND_TRANSFER_TIMEOUT is not set",
        master("--port 50088 --default_kv_lease_ttl 31000"),
        master("--port 50088 --default_kv_lease_ttl 31000", {"protocol": "tcp"}),
    ),
    Case(
        "pings can be late, and the disk of the rank is dropped (SEGMENT_NOT_FOUND)",
        master("--port 50088 --enable_offload", SSD, env=SMALL),
        master("--port 50088 --enable_offload --client_ttl=120", SSD, env=SMALL),
    ),
    Case(
        "keeps nothing apart: the master runs without --enable_multi_tenants=true",
        master("--port 50088", {"tenant_id": "team-a"}),
        master(STRICT, {"tenant_id": "team-a"}),
    ),
    Case("is required with enable_multi_tenants", master("--port 50088 --enable_multi_tenants=true"), master(STRICT)),
    Case(
        "tenants were not compared",
        master(STRICT.replace("POLICY", "/missing/quotas.yaml")),
        master(STRICT),
    ),
    Case(
        "a strict master refuses its writes",
        master(STRICT, {"tenant_id": "team-b"}),
        master(STRICT, {"tenant_id": " team-a "}),
    ),
]


AREAS = {
    "mooncake.json": FILE,
    "Transfer resources and times": RESOURCES,
    "Disk tier of Mooncake": DISK,
    "mooncake_master": MASTER_FLAGS,
}
