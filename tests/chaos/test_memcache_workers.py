"""Workers of MemCache that die, stop and fill it up, on one pool that lives through all of it."""

from __future__ import annotations

import signal
import time

import pytest

from tests.stores.memcache_pool import MemcachePool, memcache_pool
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(1800)  # it waits for the tests of MemCache in other processes
MB = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with memcache_pool(tmp_path_factory.mktemp("memcache"), dram_mb=64) as pool:
        yield pool


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(count)]


def test_handlers_of_signals_stay_whose_they_are(pool: MemcachePool):
    worker = pool.client()
    worker.signal(signal.SIGINT)  # Python's: KeyboardInterrupt
    worker.process.wait(60)
    eventually(lambda: any("KeyboardInterrupt" in line for line in worker.said), "it says that it was interrupted")


def test_a_key_of_a_killed_writer_can_be_stored_again(pool: MemcachePool):
    writer, other = pool.client(), pool.client(patience_s=5.0)
    assert writer.ask("begin", keys=["half"]) == ["ok"]
    assert writer.ask("write", keys=["half"], part=0.5) == ["ok"]
    writer.signal(signal.SIGKILL)
    assert other.ask("exists", keys=["half"]) == ["miss"]
    assert other.ask("get", keys=["half"]) == ["missing"]
    assert other.ask("put", keys=["half"]) == ["busy"]  # the library says it is stored
    assert other.ask("begin", keys=["half"]) == ["busy"]
    time.sleep(5.1)
    assert other.ask("put", keys=["half"]) == ["ok"]
    assert other.ask("get", keys=["half"]) == ["ok"]


def test_the_key_of_a_living_writer_is_left_alone(pool: MemcachePool):
    writer, other = pool.client(), pool.client(patience_s=300.0)
    assert writer.ask("begin", keys=["slow"]) == ["ok"]
    assert other.ask("put", keys=["slow"]) == ["busy"]
    assert writer.ask("write", keys=["slow"]) == ["ok"]
    assert writer.ask("commit") == ["ok"]
    assert other.ask("get", keys=["slow"]) == ["ok"]


def test_a_full_pool_makes_room(pool: MemcachePool):
    worker = pool.client()
    for turn in range(10):
        answers = worker.ask("put", keys=names(f"fill{turn}", 8), nbytes=2 * MB)
        assert answers == ["ok"] * 8, turn
        assert worker.ask("get", keys=names(f"fill{turn}", 8), nbytes=2 * MB) == ["ok"] * 8
    stats = worker.ask("stats")
    assert 0 < stats["used"] <= stats["capacity"] == 64 * MB


def test_a_batch_larger_than_the_free_rest_is_stored_all_the_same(pool: MemcachePool):
    worker = pool.client()
    worker.ask("put", keys=names("old", 24), nbytes=2 * MB)
    keys = names("big", 20)
    assert worker.ask("put", keys=keys, nbytes=2 * MB) == ["ok"] * 17 + ["no_space"] * 3  # 55 % of the pool, and not more
    assert worker.ask("get", keys=keys[:17], nbytes=2 * MB) == ["ok"] * 17


def test_bc_089_a_client_that_was_stopped_for_a_while_goes_on(pool: MemcachePool):
    worker = pool.client()
    assert worker.ask("put", keys=["before"]) == ["ok"]
    worker.signal(signal.SIGSTOP)
    time.sleep(2)
    worker.signal(signal.SIGCONT)
    assert worker.ask("get", keys=["before"]) == ["ok"]
    assert worker.ask("put", keys=names("after", 4)) == ["ok"] * 4
