"""The Mooncake store against the real master and a real owner of memory: the contract, and what is Mooncake's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops.services import processes
from kvpool.stores.base import Batch, Hit, Status, Tier
from kvpool.stores.checksums import TRAILER
from kvpool.stores.conformance import CHECKS, run_check
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore
from kvpool.stores.mooncake.listeners import open_listeners
from tests.stores.mooncake_pool import MIB, QUICK, get, key, mooncake_pool, put, statuses
from tests.stores.needs import needs_mooncake
from tests.waiting import eventually

WORKER, SCHEDULER, TOOL = StoreContext(), StoreContext(role="scheduler"), StoreContext(role="tool")
NOT_CLAIMED = ("mapped", "listable", "capacity of 0 bytes")  # the master's size is in no API of the library


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    needs_mooncake()
    with mooncake_pool(tmp_path_factory.mktemp("mooncake")) as started:
        yield started
        for _, client in _Reuses.spare:
            client.close()
        _Reuses.spare.clear()


class _Reuses(MooncakeStore):
    """The library takes a second to close, with the interpreter lock held, and the checks of the contract open a hundred stores:
    here a closed store leaves its client to the next one. Stores that are open at one time have clients of their own."""

    spare: ClassVar[list[tuple[Any, Any]]] = []

    def _connect(self) -> None:
        if self.spare:
            self._library, self._client = self.spare.pop()
        else:
            super()._connect()

    def _disconnect(self) -> None:
        self.spare.append((self._library, self._client))
        self._client = None


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check, pool):
    outcome = run_check(check, lambda: _Reuses(pool.options(), TOOL))
    if outcome.skipped and any(reason in outcome.text for reason in NOT_CLAIMED):
        return
    assert outcome.passed, outcome.text


def test_lengths_and_tiers_are_told(pool):
    store = pool.open()
    put(store, ["long"], 3 * MIB)
    assert store.exists([key("long"), key("none")])[0] == Hit(Tier.REMOTE, 3 * MIB)


def test_own_segment_is_preferred_and_mapped_ahead(pool):
    one, two = (pool.open(WORKER, global_segment_size=32 * MIB, preferred_segment=True) for _ in range(2))
    assert one.wait_mapped(90)
    assert one._upkeep.mapped_bytes >= 32 * MIB
    names = [f"own-{i}" for i in range(6)]
    assert statuses(put(one, names)) == [Status.OK] * 6
    placed = one._client.batch_get_replica_desc([key(name).decode() for name in names])
    where = {r.get_memory_descriptor().buffer_descriptor.transport_endpoint for replicas in placed.values() for r in replicas}
    assert len(where) == 1
    assert statuses(get(two, names)) == [Status.OK] * 6
    one.close()
    assert Status.OK not in statuses(get(two, names)), "what lay in a client's memory goes with it"
    two.close()


def test_scheduler_and_tool_give_no_memory(pool):
    def segments() -> set[str]:
        with urllib.request.urlopen(f"{pool.started.addresses['metrics']}/get_all_segments", timeout=30) as answer:
            return set(answer.read().decode().split())

    before = segments()
    stores = [pool.open(role, global_segment_size=32 * MIB) for role in (SCHEDULER, TOOL)]
    assert segments() == before
    assert statuses(put(stores[1], ["tool"])) == [Status.OK]
    assert statuses(get(stores[0], ["tool"])) == [Status.OK]
    for store in stores:
        store.close()


def test_the_lease_is_measured_and_compared(pool, caplog, monkeypatch):
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "2000")
    store = pool.open(SCHEDULER, load_deadline_s=30.0)
    assert 0 < store.lease([key("none")], 60.0).until - time.monotonic() <= 2.0, "what is assumed until it is known"
    seconds = store.wait_lease(60)
    assert seconds is not None
    assert 0 < seconds <= QUICK.lease_s + 0.05
    assert store.lease([key("none")], 60.0).until - time.monotonic() <= QUICK.lease_s + 0.05
    lines = [record.message for record in caplog.records if "default_kv_lease_ttl" in record.message]
    assert len(lines) == 1
    assert "ASCEND_TRANSFER_TIMEOUT=2000 ms and the load deadline of 30 s" in lines[0]
    store.close()


def test_a_lease_keeps_an_object_and_ends(pool):
    store = pool.open()
    name = key("leased").decode()

    def is_kept() -> bool:
        """The lookup and the removal came within one lease."""
        put(store, ["leased"])
        store.exists([key("leased")])
        return store._client.remove(name) == -706

    eventually(is_kept, "a leased object is not removed")
    eventually(lambda: store._client.remove(name) == 0, "the lease ends")
    store.close()


def test_bc_084_a_read_goes_on_after_its_lease_has_ended(pool):
    store = pool.open()
    put(store, ["slow"])
    reader = store.begin_read([key("slow")], 60.0)
    got = np.zeros(MIB, dtype=np.uint8)
    for start in (0, MIB // 2):
        piece = np.array([[got.ctypes.data + start]], dtype=np.int64), np.array([MIB // 2], dtype=np.int64)
        assert statuses(reader.read([0], start, *piece)) == [Status.OK]
        time.sleep(QUICK.lease_s + 0.3)
    put(store, ["slow"])  # the same bytes: EXISTS
    reader.end()
    assert statuses(get(store, ["slow"])) == [Status.OK]
    store.close()


def test_a_batch_larger_than_the_pool(pool):
    store = pool.open()
    names = [f"big-{i}" for i in range(90)]
    results = put(store, names, deadline_s=60.0)
    assert set(statuses(results)) <= {Status.OK, Status.NO_SPACE, Status.BUSY}  # BUSY: evicted before it could be confirmed
    assert statuses(results).count(Status.OK) >= 16
    assert set(statuses(get(store, names))) <= {Status.OK, Status.MISSING}
    time.sleep(QUICK.lease_s)
    eventually(lambda: statuses(put(store, ["after"]))[0] in (Status.OK, Status.EXISTS), "there is room again without leases")
    assert statuses(get(store, ["after"])) == [Status.OK]
    store.close()


def test_clear_by_prefix(pool):
    store = pool.open()
    put(store, ["(a)1", "(a)2", "(b)1"], 4096)
    assert store.clear(key("(a)")) == 2
    assert [isinstance(answer, Hit) for answer in store.exists([key(n) for n in ("(a)1", "(a)2", "(b)1")])] == [False, False, True]
    assert not store.capabilities.listable
    store.close()


def test_objects_written_whole_are_read_in_pieces_and_the_reverse(pool):
    store = pool.open()
    put(store, ["whole"])
    data = np.zeros(MIB, dtype=np.uint8)
    reader = store.begin_read([key("whole")], 10.0)
    half = MIB // 2
    for start in (half, 0):  # out of order: not checked, but read
        piece = np.array([[data.ctypes.data + start]], dtype=np.int64), np.array([half], dtype=np.int64)
        assert statuses(reader.read([0], start, *piece)) == [Status.OK]
    reader.end()
    writer = store.begin_write([key("pieces-a"), key("pieces-b")], MIB, 10.0)
    for row, order in ((0, (0, half)), (1, (half, 0))):
        for start in order:
            piece = np.array([[data.ctypes.data + start]], dtype=np.int64), np.array([half], dtype=np.int64)
            assert statuses(writer.write([row], start, *piece)) == [Status.OK]
    assert statuses(writer.commit()) == [Status.OK] * 2
    got = np.zeros(MIB, dtype=np.uint8)
    for name in ("pieces-a", "pieces-b"):
        batch = Batch([key(name)], np.array([[got.ctypes.data]], dtype=np.int64), np.array([MIB], dtype=np.int64))
        handle = store.get(batch, 10.0)
        assert handle.wait(20)
        assert statuses(handle.results()) == [Status.OK]
        assert np.array_equal(got, data)
        got[:] = 0
    store.close()


def test_writers_left_open_are_revoked_by_close(pool):
    one, two = pool.open(), pool.open()
    writer = one.begin_write([key("left")], 4096, 10.0)
    assert statuses(writer.results) == [Status.OK]
    assert one.stats().writing == 1
    assert statuses(put(two, ["left"], 4096)) == [Status.BUSY]
    one.close()
    assert statuses(put(two, ["left"], 4096)) == [Status.OK]
    data = np.zeros(4096, dtype=np.uint8)
    piece = np.array([[data.ctypes.data]], dtype=np.int64), np.array([4096], dtype=np.int64)
    assert statuses(writer.write([0], 0, *piece)) == [Status.FATAL]
    assert statuses(writer.commit()) == [Status.FATAL]
    two.close()


def test_bc_092_nothing_reaches_the_library_after_close(pool):
    """The library ends the process when it is called after close; so this runs in one of its own."""
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.stores.mooncake_pool import *
options = read_mooncake(open({pool.started.env["MOONCAKE_CONFIG_PATH"]!r}).read(), "f", {{}}, UNKNOWN).options
for turn in range(2):
    store = MooncakeStore(options, StoreContext())
    store.open()
    reader, writer = store.begin_read([key("x")], 5.0), store.begin_write([key(f"w{{turn}}")], 64, 5.0)
    stop = threading.Event()
    def use():
        while not stop.is_set():
            store.exists([key(i) for i in range(50)]); store.health(); store.stats()
            put(store, [1, 2], 4096); get(store, [1, 2], 4096)
    threads = [threading.Thread(target=use) for _ in range(3)]
    [thread.start() for thread in threads]
    time.sleep(0.2)
    store.close()
    time.sleep(0.1)
    stop.set()
    [thread.join() for thread in threads]
    reader.end(); writer.abort(); writer.commit(); store.remove([key("x")]); store.write_note(b"a:b", "c")
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip().endswith("alive"), done.stderr[-2000:]
    assert done.returncode == 0


def test_listeners_are_named_once(pool, caplog):
    store = pool.open()
    lines = [record.message for record in caplog.records if "listens on" in record.message]
    assert len(lines) == 1
    assert set(lines[0].split(" listens on ")[1].split(", without")[0].split(", ")) <= open_listeners()
    store.close()


def test_bc_146_clients_that_start_at_once_are_distinct(pool, tmp_path):
    count, start = 4, time.time() + 2.0
    path = pool.started.env["MOONCAKE_CONFIG_PATH"]
    command = [sys.executable, "-m", "tests.stores.mooncake_client", path]
    marks = tmp_path / "marks"
    marks.mkdir()
    clients = [
        subprocess.Popen(
            [*command, str(me), str(count), str(start), str(marks)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for me in range(count)
    ]
    told = [client.communicate(timeout=200) for client in clients]
    assert [client.returncode for client in clients] == [0] * count, told
    names = [out.split()[-1] for out, _ in told]
    assert len(set(names)) == count, names


def test_the_service_is_found_again_and_says_its_state(pool):
    assert pool.service.status(pool.folder) == {"master": "ready", "owner": "ready"}
    with pytest.raises(ValueError, match="runs"):
        pool.service.start(pool.folder, 5)
    assert json.loads((pool.folder / "mooncake.json").read_text())["global_segment_size"] == 0
    assert processes.load(pool.folder).addresses["master"].startswith("127.0.0.1:")


def stat(pool):
    """What `kvpool store stat --service mooncake` says."""
    words = ["store", "stat", "--service", "mooncake", "--folder", str(pool.folder), "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


def test_stat_tells_how_full_the_pool_is_also_without_tenants(pool):
    store = pool.open()
    put(store, ["counted"])
    told = stat(pool)
    assert told["tenants"] is None
    assert told["capacity_bytes"] == 64 * MIB
    assert MIB <= told["used_bytes"] <= 64 * MIB
    table = CliRunner().invoke(app, ["store", "stat", "--service", "mooncake", "--folder", str(pool.folder)]).stdout
    assert "67,108,864" in table
    assert "no tenants" in table
    store.close()


def test_tenants(tmp_path):
    needs_mooncake()
    with mooncake_pool(tmp_path / "strict", tenants={"a": "64MB", "b": "16MB"}, dram=128 * MIB) as strict:
        one, two = strict.open(), strict.open(tenant_id="b")
        assert statuses(put(one, ["same"])) == [Status.OK]
        assert not isinstance(two.exists([key("same")])[0], Hit), "tenants do not see each other"
        assert statuses(put(two, ["same"])) == [Status.OK]
        for tenant in ("default", "nobody"):
            with pytest.raises(OSError, match=f"no quota for tenant_id='{tenant}'"):
                strict.open(tenant_id=tenant)
        names = [f"quota-{i}" for i in range(24)]
        results = put(two, names, deadline_s=3.0)
        assert set(statuses(results)) <= {Status.OK, Status.NO_SPACE}, "over quota: own objects make room, or there is none"
        kept = statuses(get(two, ["same", *names]))
        assert set(kept) <= {Status.OK, Status.MISSING}
        assert 1 <= kept.count(Status.OK) <= 16 * MIB // (MIB + TRAILER), "what tenant b holds fits into its quota"
        told = stat(strict)
        assert told["capacity_bytes"] == 128 * MIB
        assert [(each["tenant"], each["quota_bytes"]) for each in told["tenants"]] == [("a", 64 * MIB), ("b", 16 * MIB)]
        used = {each["tenant"]: each["used_bytes"] for each in told["tenants"]}
        assert used["a"] == MIB + TRAILER
        assert kept.count(Status.OK) * MIB <= used["b"] <= 16 * MIB
        assert told["used_bytes"] >= sum(used.values())
        assert statuses(get(one, ["same"])) == [Status.OK], "the others' objects stay"
        assert two.clear(key("")) > 0
        assert statuses(get(one, ["same"])) == [Status.OK]
