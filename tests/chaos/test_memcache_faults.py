"""MemCache when its processes die, stop or fill up: nothing hangs, nothing is told that is not so, and it recovers by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.memcache_pool import Client, MemcachePool, memcache_pool

pytestmark = pytest.mark.timeout(1800)  # it waits for the tests of MemCache in other processes
LOOKUP_S = 2.0  # Limits.lookup_s
RECOVERY_S = 60.0
SLACK_S = 8.0  # beyond a deadline, on a machine that is busy
BACKED_UP_S = 3.0
"""What was stored this long before the MetaService dies is known to a new one: the owners of the memory keep its books."""


@pytest.fixture
def pool(tmp_path: Path):
    with memcache_pool(tmp_path, dram_mb=64) as pool:
        yield pool


def until(ask: Callable[[], object], wanted: object, limit_s: float = RECOVERY_S) -> None:
    """Ask until the answer is the wanted one."""
    began = time.monotonic()
    while (got := ask()) != wanted:
        assert time.monotonic() - began < limit_s, f"not {wanted} but {got} after {limit_s:g} s"
        time.sleep(0.1)


def store(worker: Client, keys: list[str]) -> None:
    """As an engine does: what is TRANSIENT is offered again."""
    until(lambda: set(worker.ask("put", keys=keys)) <= {"ok", "exists"}, True)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{i}" for i in range(count)]


def quick(client: Client, limit_s: float, do: str, **arguments: object) -> object:
    answer = client.ask(do, **arguments)
    assert client.took_s < limit_s + SLACK_S, f"{do} took {client.took_s:.1f} s"
    return answer


def joins_or_says_why(pool: MemcachePool, keys: list[str]) -> None:
    """After the restart of a MetaService the library sometimes hangs in processes that join: then that is one line, in time.
    Sometimes it joins, and all that it is asked fails: then that is never taken for a miss."""
    late = pool.worker()
    answer = late.ask("open", connect_s=5.0, timeout_s=40.0)
    assert late.took_s < 5 + SLACK_S
    if answer != "open":
        assert "did not start within 5 s" in answer
        return
    began = time.monotonic()
    while (got := late.ask("get", keys=keys)) != ["ok"] * len(keys) and time.monotonic() - began < RECOVERY_S:
        assert set(got) <= {"ok", "transient", "overdue"}
        time.sleep(0.1)


def test_a_killed_meta_service_loses_nothing(pool: MemcachePool):
    worker, keys = pool.client(), names("kept", 16)
    store(worker, keys)
    time.sleep(BACKED_UP_S)
    os.kill(pool.pid("meta-service"), signal.SIGKILL)
    until(lambda: worker.ask("health"), False)
    assert quick(worker, LOOKUP_S, "exists", keys=keys) == ["unknown"] * 16  # never "miss": it cannot tell
    assert set(quick(worker, 5, "get", keys=keys, wait_s=5.0)) <= {"transient", "overdue"}
    assert set(quick(worker, 5, "put", keys=names("new", 4), wait_s=5.0)) <= {"transient", "overdue"}
    pool.restart_meta_service()
    until(lambda: worker.ask("exists", keys=keys), ["hit"] * 16)
    assert worker.ask("get", keys=keys) == ["ok"] * 16
    until(lambda: worker.ask("put", keys=names("after", 4)), ["ok"] * 4)
    joins_or_says_why(pool, keys)


def test_a_stopped_meta_service_blocks_nobody_for_longer_than_the_deadlines(pool: MemcachePool):
    worker, keys = pool.client(), names("still", 8)
    store(worker, keys)
    os.kill(pool.pid("meta-service"), signal.SIGSTOP)
    try:
        assert quick(worker, LOOKUP_S, "exists", keys=keys) == ["unknown"] * 8
        assert set(quick(worker, 2, "get", keys=keys, wait_s=2.0)) <= {"transient", "overdue"}
        assert quick(worker, LOOKUP_S, "health") is False
    finally:
        os.kill(pool.pid("meta-service"), signal.SIGCONT)
    until(lambda: worker.ask("exists", keys=keys), ["hit"] * 8)
    until(lambda: worker.ask("get", keys=keys), ["ok"] * 8)
    assert worker.ask("put", keys=names("again", 4)) == ["ok"] * 4


def test_no_meta_service_at_open_is_an_error_within_the_deadline(pool: MemcachePool):
    worker = pool.client()
    os.kill(pool.pid("meta-service"), signal.SIGKILL)
    assert worker.ask("close") == "closed"
    assert worker.took_s < 40
    answer = worker.ask("open", connect_s=2.0, timeout_s=40.0)
    assert "nobody answers at tcp://127.0.0.1:" in answer
    assert worker.took_s < 2 + SLACK_S
    pool.restart_meta_service()
    until(lambda: worker.ask("open", connect_s=5.0), "open")
    until(lambda: worker.ask("put", keys=["later"]), ["ok"])  # once those who give memory have come back


def test_a_meta_service_that_listens_but_does_not_answer_at_open(pool: MemcachePool):
    worker = pool.client()
    worker.ask("close")
    os.kill(pool.pid("meta-service"), signal.SIGSTOP)
    answer = worker.ask("open", connect_s=3.0, timeout_s=40.0)
    assert "did not start within 3 s" in answer
    assert worker.took_s < 3 + SLACK_S
    other = pool.worker()
    assert "did not start" in other.ask("open", connect_s=1.0, timeout_s=40.0)
    other.end(40.0)  # though its start hangs
    os.kill(pool.pid("meta-service"), signal.SIGCONT)
    until(lambda: worker.ask("open", connect_s=5.0), "open")  # with what started too late
    until(lambda: worker.ask("put", keys=["later"]), ["ok"])


def test_a_process_can_end_whatever_the_meta_service_does(pool: MemcachePool):
    """By itself the library crashes a process that did not close it, and hangs one whose MetaService does not answer."""
    well, stopped, gone = pool.client(), pool.client(), pool.client()
    assert well.end(40.0) == 0
    os.kill(pool.pid("meta-service"), signal.SIGSTOP)
    stopped.end(40.0)
    os.kill(pool.pid("meta-service"), signal.SIGKILL)
    gone.end(40.0)


def test_a_killed_owner_leads_to_no_wrong_bytes(pool: MemcachePool):
    """Mostly its objects are gone at once; sometimes the MetaService does not notice, and its memory is still mapped here, or
    cannot be read."""
    worker, keys = pool.client(), names("owned", 8)
    store(worker, keys)
    os.kill(pool.pid("local-service"), signal.SIGKILL)
    for turn in range(6):
        found = worker.ask("exists", keys=keys)
        got = worker.ask("get", keys=keys)
        known = (("hit", "ok"), ("hit", "transient"), ("hit", "missing"), ("miss", "missing"))
        assert (found, got) in [([one] * 8, [other] * 8) for one, other in known]
        new = names(f"homeless{turn}", 2)
        stored = worker.ask("put", keys=new, wait_s=10.0)
        assert stored in (["ok"] * 2, ["no_space"] * 2)
        assert "wrong bytes" not in worker.ask("get", keys=new)
        time.sleep(0.3)
    assert worker.ask("health") is True
