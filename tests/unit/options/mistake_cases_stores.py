"""How each mistake in choosing a store, in the local store and in versions is made; see mistake_cases.py."""

from __future__ import annotations

import json

from tests.unit.options.mistake_cases import LOCAL, MASTER, Case, L, on, pool

from kvpool.options.load import read_ascend_store
from kvpool.options.memcache_conf import read_local_conf
from kvpool.options.mooncake_json import read_mooncake
from kvpool.options.versions import check_version

TEXT = json.dumps(MASTER)


def backend_unset(env):
    return read_ascend_store({}, kv_role="kv_both", env=env).warnings


CHOICE = [
    Case(
        'is not set, but MMC_LOCAL_CONFIG_PATH is: set "backend": "memcache"',
        lambda _: backend_unset({"MMC_LOCAL_CONFIG_PATH": "x"}),
        lambda _: backend_unset({}),
    ),
    Case(
        "MOONCAKE_CONFIG_PATH: is not set: the mooncake backend needs the path of its configuration file",
        lambda folder: pool(folder, "mooncake"),
        lambda folder: pool(folder, "mooncake", TEXT),
    ),
    Case(
        "MMC_LOCAL_CONFIG_PATH: is not set: the memcache backend needs the path of its configuration file",
        lambda folder: pool(folder, "memcache"),
        lambda folder: pool(folder, "memcache", LOCAL),
    ),
    Case(
        "YR_CONFIG_PATH: is not set (or DS_WORKER_ADDR): the yuanrong backend needs",
        lambda folder: pool(folder, "yuanrong"),
        lambda folder: pool(folder, "yuanrong", env={"DS_WORKER_ADDR": "10.0.0.1:31501"}),
    ),
    Case(
        "cannot be read: No such file or directory",
        lambda folder: pool(folder, "mooncake", env={"MOONCAKE_CONFIG_PATH": str(folder / "missing")}),
        lambda folder: pool(folder, "mooncake", TEXT),
    ),
    Case(
        "does not reach the memory of cuda; accepted: mooncake",
        lambda folder: pool(folder, "memcache", LOCAL, deployment=on(device="cuda")),
        lambda folder: pool(folder, "mooncake", json.dumps({**MASTER, "protocol": "tcp"}), deployment=on(device="cuda")),
    ),
    Case(
        "a comment is not JSON",
        lambda folder: pool(folder, "mooncake", TEXT + " # the master"),
        lambda folder: pool(folder, "mooncake", TEXT),
    ),
]


def version(backend, installed, options=None, *, ranged=False):
    def read(_):
        check_version(backend, installed, options, ranged=ranged)
        return []

    return read


TENANT = read_mooncake(json.dumps({**MASTER, "tenant_id": "team-a"}), "f", {}, on()).options
STORAGE = read_local_conf(f"{LOCAL}{L}.storage.enabled = true\n", "f").options
VERSIONS = [
    Case("is too old: kvpool needs at least 0.3.11.post1", version("mooncake", "0.3.11"), version("mooncake", "0.3.11.post1")),
    Case(
        "is too old: tenant_id=team-a needs at least 0.3.12",
        version("mooncake", "0.3.11.post2", TENANT),
        version("mooncake", "0.3.12", TENANT),
    ),
    Case(
        "is too old: use_layerwise needs at least 0.3.13",
        version("mooncake", "0.3.12.post4", ranged=True),
        version("mooncake", "0.3.13", ranged=True),
    ),
    Case(
        "is too old: storage.enabled needs at least 1.2.0",
        version("memcache", "1.1.9", STORAGE),
        version("memcache", "1.3.0", STORAGE),
    ),
]


def local(**options):
    def read(folder):
        (folder / "tier").mkdir()
        extra = {"backend": "local", "enable_ssd_offload": True, "ssd_offload_path": str(folder / "tier"), **options}
        return read_ascend_store(extra, kv_role="kv_both", env={}).warnings

    return read


def on_mooncake(**options):
    return lambda folder: pool(folder, "mooncake", TEXT, **options)


LOCAL_TIER = [
    Case("is required with enable_ssd_offload: the room on the disk", local(), local(local_ssd_size="1MB")),
    Case("the tier will be smaller", local(local_ssd_size="1000000TB"), local(local_ssd_size="1MB")),
    Case(
        "is above local_ssd_high_watermark=",
        local(local_ssd_size="1MB", local_ssd_low_watermark=96),
        local(local_ssd_size="1MB", local_ssd_low_watermark=95),
    ),
    Case(
        "no effect without enable_ssd_offload",
        local(enable_ssd_offload=False, local_ssd_size="1MB"),
        local(local_ssd_size="1MB"),
    ),
    Case("is an option of the local backend", on_mooncake(enable_ssd_offload=True), on_mooncake()),
    Case("or hits could be evicted while they load", on_mooncake(lease_ms=30000), on_mooncake(lease_ms=30001)),
]

AREAS = {
    "Which store, and its file": CHOICE,
    "Local store and its disk tier": LOCAL_TIER,
    "Versions": VERSIONS,
}
