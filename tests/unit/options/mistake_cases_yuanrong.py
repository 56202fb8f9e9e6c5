"""How each mistake in configuring Yuanrong is made; see mistake_cases.py."""

from __future__ import annotations

import json

from tests.unit.options.mistake_cases import WORKER, Case, checked, on, pool

from kvpool.options.yuanrong_json import read_yuanrong

HCCS = {"DS_RH2D_LINK_TYPE": "HCCS"}
REMOTE = {"enable_remote_h2d": True}
LOGS = "DATASYSTEM_CLIENT_LOG_DIR"


def client(raw=(), env=(), deployment=None, **given):
    return lambda _: (
        read_yuanrong(json.dumps({**WORKER, **dict(raw)}), "yuanrong.json", dict(env), deployment or on(), **given).warnings
    )


FILE = [
    Case("worker_addr=null: is required", client({"worker_addr": None}), client({"worker_addr": None}, {"DS_WORKER_ADDR": "h:1"})),
    Case("is a wildcard, on which nobody can be reached", client({"worker_addr": "0.0.0.0:31501"}), client()),
    Case(
        "is reached from one host only, but 2 hosts share the pool",
        client({"worker_addr": "127.0.0.1:31501"}, deployment=on(hosts=2)),
        client({"worker_addr": "127.0.0.1:31501"}, deployment=on(hosts=1)),
    ),
    Case(
        "worker_addr: the file wins", client({}, {"DS_WORKER_ADDR": "h:1"}), client({}, {"DS_WORKER_ADDR": WORKER["worker_addr"]})
    ),
    Case("of the connector", client({"use_layerwise": True}, use_layerwise=False), client(use_layerwise=False)),
    Case("must be HCCS, as on the workers, since remote_h2d_transport_backend is HIXL", client(REMOTE), client(REMOTE, HCCS)),
    Case(
        "must be ROCE or unset, since remote_h2d_transport_backend is P2P_TRANSFER",
        client({**REMOTE, "remote_h2d_transport_backend": "P2P_TRANSFER"}, HCCS),
        client({**REMOTE, "remote_h2d_transport_backend": "P2P_TRANSFER"}),
    ),
    Case("expected HCCS or ROCE, in capitals", client(REMOTE, {"DS_RH2D_LINK_TYPE": "hccs"}), client(REMOTE, HCCS)),
    Case(
        "enable_remote_h2d falls back to false: the KV lies on cpu",
        client(REMOTE, deployment=on(device="cpu")),
        client(REMOTE, HCCS, on(device="npu")),
    ),
    Case(
        "enable_remote_h2d falls back to false: this host has no huge pages",
        client(REMOTE, HCCS, on(device="npu", pages=0)),
        client(REMOTE, HCCS, on(device="npu", pages=20480)),
    ),
    Case(
        "enable_fabric_mem has no effect without remote_h2d_transport_backend HIXL",
        client({"enable_fabric_mem": True, "remote_h2d_transport_backend": "P2P_TRANSFER"}),
        client({"enable_fabric_mem": True}),
    ),
    Case(
        "enable_dev_mem_pregister has no effect",
        client({"enable_dev_mem_pregister": True}),
        client({"enable_dev_mem_pregister": True, **REMOTE}, HCCS),
    ),
    Case(
        "a load would be given up while the store still waits",
        lambda folder: pool(folder, "yuanrong", json.dumps({**WORKER, "get_sub_timeout_ms": 30001})),
        lambda folder: pool(folder, "yuanrong", json.dumps({**WORKER, "get_sub_timeout_ms": 30000})),
    ),
    Case('DATASYSTEM_CLIENT_LOG_DIR="logs": expected an absolute path', client(env={LOGS: "logs"}), client(env={LOGS: "/logs"})),
    Case(
        "is not writable and cannot be made: the client will not log",
        client(env={LOGS: "/logs"}, deployment=on(can_make=False)),
        client(env={LOGS: "/logs"}),
    ),
]

COORDINATOR = "--coordinator_address 10.0.0.9:31511"
HUGE = "--enable_huge_tlb true --enable_fallocate false"
H2D = f"{COORDINATOR} {HUGE} --arena_per_tenant 1 --remote_h2d_device_ids 0,1"


def workers(*flags, raw=(), env=(), deployment=None, start="dscli start -w"):
    """`config check` of the commands of workers, the first at the client's address, with a yuanrong.json."""
    services = [f"{start} --worker_address 10.0.0.{index}:31501 {line}" for index, line in enumerate(flags, start=1)]
    text = json.dumps({**WORKER, **dict(raw)})
    return lambda folder: checked(folder, {"yuanrong.json": text}, services=services, env=dict(env), deployment=deployment or on())


def at(address, *others):
    """A worker at ``address`` with a local metastore, and others."""
    services = [f"dscli start -w --worker_address {address} --metastore_address 127.0.0.1:2379", *others]
    return lambda folder: checked(folder, {"yuanrong.json": json.dumps({"worker_addr": address})}, services=services)


LOOPBACK = "dscli start -w --worker_address 127.0.0.1:31501 --metastore_address 127.0.0.1:2379"
LINK = "--remote_h2d_link_type HCCS"
SECOND = "dscli start -w --worker_address 127.0.0.1:31502 --metastore_address 127.0.0.1:2379"
FITS = workers(COORDINATOR)
WORKERS = [
    Case(
        "needs exactly one of coordinator_address, etcd_address, metastore_address",
        workers(f"{COORDINATOR} --etcd_address 10.0.0.9:2379"),
        FITS,
    ),
    Case(
        "other workers cannot reach it",
        lambda folder: checked(folder, {}, services=[f"dscli start -w --worker_address 127.0.0.1:31501 {COORDINATOR}"]),
        at("127.0.0.1:31501"),
    ),
    Case("is loopback or a wildcard, but there are 2 workers", at("127.0.0.1:31501", SECOND), at("127.0.0.1:31501")),
    Case(
        "differs from 10.0.0.9:31511 of",
        workers(COORDINATOR, COORDINATOR.replace("31511", "31512")),
        workers(COORDINATOR, COORDINATOR),
    ),
    Case("is not split at the =: write the value after a blank", workers(COORDINATOR.replace(" ", "=")), FITS),
    Case("is that of --service 1 too", at("10.0.0.1:31501", LOOPBACK.replace("127.0.0.1:31501", "10.0.0.1:31501")), FITS),
    Case(
        "is relative: the logs lie wherever the worker is started",
        workers(f"{COORDINATOR} --log_dir logs"),
        workers(f"{COORDINATOR} --log_dir /logs"),
    ),
    Case("no worker has this address", workers(COORDINATOR, raw={"worker_addr": "10.0.0.7:31501"}), FITS),
    Case(
        "does not go with enable_huge_tlb: set --enable_fallocate false",
        workers(f"{COORDINATOR} --enable_huge_tlb true"),
        workers(f"{COORDINATOR} {HUGE}"),
    ),
    Case(
        "huge pages of 2 MiB, this host has reserved",
        workers(f"{COORDINATOR} {HUGE} --shared_memory_size_mb 40960", deployment=on(pages=20479)),
        workers(f"{COORDINATOR} {HUGE} --shared_memory_size_mb 40960", deployment=on(pages=20480)),
    ),
    Case("needs --enable_huge_tlb true", workers(f"{COORDINATOR} --remote_h2d_device_ids 0"), workers(H2D)),
    Case("needs --arena_per_tenant 1", workers(H2D.replace("--arena_per_tenant 1", "")), workers(H2D)),
    Case(
        "is also the address of HIXL",
        lambda folder: checked(folder, {}, services=[f"{LOOPBACK} {HUGE} --arena_per_tenant 1 --remote_h2d_device_ids 0 {LINK}"]),
        workers(f"{H2D} --remote_h2d_link_type HCCS"),
    ),
    Case(
        "but its worker runs without --remote_h2d_device_ids",
        workers(COORDINATOR, raw=REMOTE, env=HCCS),
        workers(f"{H2D} --remote_h2d_link_type HCCS", raw=REMOTE, env=HCCS),
    ),
    Case(
        "needs workers with --remote_h2d_link_type HCCS, not ROCE",
        workers(H2D, raw=REMOTE, env=HCCS),
        workers(f"{H2D} --remote_h2d_link_type HCCS", raw=REMOTE, env=HCCS),
    ),
    Case(
        "which takes all that follows: move it in front",
        workers(f"{COORDINATOR} --timeout 60"),
        workers(COORDINATOR, start="dscli start --timeout 60 -w"),
    ),
]

AREAS = {"yuanrong.json": FILE, "dscli start": WORKERS}
