"""The MemCache store on the real MetaService and LocalService, over shared memory of this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.ops.services.memcache import META_SERVICE_LOCK, MemcacheService
from kvpool.stores.conformance import CHECKS
from tests.stores.memcache_pool import MemcachePool, memcache_pool

NOT_CLAIMED = {
    "reserve_publish_discard",
    "publish_twice_fails",
    "pin_reads_in_place",
    "reserve_when_full",
}  # its memory is not mapped
CONFORMANCE_S = 240.0
OF_ANOTHER_TEST = "memfabric_hybrid_test-"  # tests.unit.stores.test_service_processes, which may run at the same time
pytestmark = pytest.mark.timeout(1800)  # it waits for the tests of MemCache in other processes


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with memcache_pool(tmp_path_factory.mktemp("memcache"), dram_mb=64) as pool:
        yield pool


@pytest.fixture(scope="module")
def outcomes(pool: MemcachePool):
    """Every check, from one process that ran them all."""
    said = pool.stage.python("tests.stores.memcache_worker", str(pool.folder), "conformance", timeout_s=CONFORMANCE_S)
    decoder = json.JSONDecoder()  # the library may print behind an answer
    lines = [decoder.raw_decode(line[2:])[0] for line in said.splitlines() if line.startswith("> ")]
    return {outcome["check"]: outcome for outcome in lines}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, outcomes):
    outcome = outcomes[check.__name__]
    assert outcome["skipped"] == (check.__name__ in NOT_CLAIMED), outcome["text"]
    assert outcome["passed"] or outcome["skipped"], outcome["text"]


def test_the_real_folders_stay_as_they_are(pool: MemcachePool):
    assert pool.pid("meta-service")
    assert not Path("/usr/local/Ascend").exists()
    assert not Path("/etc/ascend_install.info").exists()
    segments = [path for path in Path("/dev/shm").glob("memfabric_hybrid_*") if not path.name.startswith(OF_ANOTHER_TEST)]
    assert not segments


def test_a_restarted_engine_hits(pool: MemcachePool):
    keys = [f"restart-{i}" for i in range(16)]
    first = pool.client()
    assert first.ask("put", keys=keys) == ["ok"] * 16
    assert first.ask("close") == "closed"
    second = pool.client()
    assert second.ask("exists", keys=keys) == ["hit"] * 16
    assert second.ask("get", keys=keys) == ["ok"] * 16
    second.process.kill()
    assert pool.client().ask("get", keys=keys) == ["ok"] * 16  # also after kill -9


def test_the_scheduler_only_looks_up(pool: MemcachePool):
    worker, scheduler = pool.client(), pool.client(role="scheduler")
    assert worker.ask("put", keys=["s-1"]) == ["ok"]
    assert scheduler.ask("exists", keys=["s-1", "s-2"]) == ["hit", "miss"]
    assert scheduler.ask("put", keys=["s-3"])[0] in ("fatal", "transient")
    assert scheduler.ask("get", keys=["s-1"])[0] in ("fatal", "transient")
    assert worker.ask("exists", keys=["s-3"]) == ["miss"]


def test_bc_097_another_length_and_the_longest_key(pool: MemcachePool):
    worker = pool.client()
    longest = "k" * 255
    assert worker.ask("put", keys=[longest], nbytes=5000) == ["ok"]
    assert worker.ask("get", keys=[longest], nbytes=5000) == ["ok"]
    assert worker.ask("get", keys=[longest], nbytes=5001) == ["missing"]
    assert worker.ask("get", keys=[longest], nbytes=4999) == ["missing"]


def test_bc_155_duplicates_of_two_processes_are_stored_once(pool: MemcachePool):
    one, two = pool.client(), pool.client()
    keys = [f"twin-{i}" for i in range(32)]
    for key in keys:
        answers = {one.ask("put", keys=[key])[0], two.ask("put", keys=[key])[0]}
        assert answers == {"ok", "exists"}
    assert two.ask("get", keys=keys) == ["ok"] * 32


def test_there_can_be_only_one_meta_service(pool: MemcachePool, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"a MetaService runs on this host.*there can be only one"):
        pool.stage.python("tests.ascend_stand_in.service", "start", str(tmp_path), "0", timeout_s=90.0)
    assert META_SERVICE_LOCK.exists()


def test_status_and_a_clean_stop(pool: MemcachePool):
    """The last test of this pool."""
    assert MemcacheService().status(pool.folder) == {"meta-service": "ready", "local-service": "ready"}
    for client in pool.clients:
        client.process.kill()
    assert "local-service" not in pool.stop()  # it was closed; the MetaService sometimes has to be killed
    assert MemcacheService().status(pool.folder) == {}
