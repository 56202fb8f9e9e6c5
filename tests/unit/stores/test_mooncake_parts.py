"""Parts of the Mooncake store that need no Mooncake: numbers, versions, deadlines, answers of a client that lies."""

import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from kvpool.ops.services.mooncake import MasterOptions
from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_ssd import BUCKET, CLIENT_TTL, HEARTBEAT
from kvpool.options.prefill_decode import transfer_timeout_ms
from kvpool.stores.base import MISS, UNKNOWN, Batch, Hit, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore, codes, connect, lease_ttl, library, ssd

MIB = 1 << 20


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Variables that the store sets for its library do not outlive a test."""
    for name in (BUCKET, HEARTBEAT, *connect.BOUNDS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def options(**changes):
    return MooncakeOptions(master_server_address="127.0.0.1:1", protocol="tcp", global_segment_size=0).model_copy(update=changes)


def test_bc_001_the_library_is_imported_by_open_only():
    code = "import sys, kvpool.stores.mooncake; sys.exit('mooncake' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [(-704, "MISSING"), (-703, "MISSING"), (-706, "BUSY"), (-707, "TRANSIENT"), (-200, "NO_SPACE"), (-800, "TRANSIENT"),
     (-900, "TRANSIENT"), (-1700, "NO_SPACE"), (-1701, "FATAL"), (-10, "TRANSIENT"), (-4711, "TRANSIENT")],
)  # fmt: skip
def test_numbers_are_kept_with_their_names(code, status):
    result = codes.failure(code)
    assert (result.status, result.code) == (Status[status], code)
    assert result.text


def test_bc_097_only_the_exact_length_is_a_hit():
    assert [r.status for r in codes.get_results([64, 0, 63, 65, -1, -600], 6, 64)] == [
        Status.OK, Status.MISSING, Status.MISSING, Status.MISSING, Status.TRANSIENT, Status.MISSING,
    ]  # fmt: skip
    for answers in ([64], [64] * 3, []):
        with pytest.raises(OSError, match="answers for 2 keys"):
            codes.get_results(answers, 2, 64)


@pytest.mark.parametrize(
    ("there", "tenants", "error"),
    [
        ({}, False, "pip install mooncake-transfer-engine-non-cuda"),
        ({"mooncake-transfer-engine": "0.3.11"}, False, "too old: install 0.3.11.post1"),
        ({"mooncake-transfer-engine-npu": "0.3.11.post1"}, True, "tenant_id other than default needs Mooncake 0.3.12"),
        ({"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.13"}, False, "both installed"),
    ],
)
def test_bc_158_the_right_distribution_and_version_are_named(monkeypatch, there, tenants, error):
    monkeypatch.setattr(library, "_version", there.get)
    with pytest.raises(ValueError, match=error):
        library.load("cpu", tenants=tenants)


def test_versions_are_compared_by_number():
    order = ["0.3.9", "0.3.11", "0.3.11.post1", "0.3.12", "0.3.12.post1", "0.3.13.post1", "0.3.14", "1.0"]
    assert all(library.older(a, b) and not library.older(b, a) for a, b in pairwise(order))


def test_bc_002_protocol_and_memory_must_fit():
    for device, protocol in (("cpu", "ascend"), ("npu", "tcp"), ("cuda", "ascend")):
        with pytest.raises(ValueError, match=f"protocol='{protocol}' cannot move KV in {device} memory"):
            connect.check_protocol(options(protocol=protocol), StoreContext(device=device))
    for device, protocol in (("cpu", "tcp"), ("cpu", "rdma"), ("cuda", "rdma"), ("npu", "ascend")):
        connect.check_protocol(options(protocol=protocol), StoreContext(device=device))


class SetupClient:
    def __init__(self, answer):
        self.answer = answer

    def setup(self, *arguments, **extra):
        return self.answer()


def raising():
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: -1, "rank 3, master m:1.*code -1, INTERNAL_ERROR"),
        (raising, "rank 3, master m:1.*no such device"),
    ],
)
def test_bc_095_a_setup_that_fails_says_where_and_why(answer, error):
    client = SetupClient(answer)
    with pytest.raises(OSError, match=error):
        connect._set_up(client, (), {}, "rank 3, master m:1")


def test_bc_152_every_global_rank_has_a_folder_of_its_own(tmp_path, monkeypatch):
    for name in (BUCKET, HEARTBEAT):
        monkeypatch.delenv(name, raising=False)
    chosen = options(enable_ssd_offload=True, ssd_offload_path=str(tmp_path), global_segment_size=256 * MIB)
    paths = {ssd.arguments(chosen, StoreContext(rank=rank), {})["ssd_offload_path"] for rank in range(4)}
    assert paths == {str(tmp_path / f"rank_{rank}") for rank in range(4)}


def test_buckets_suit_the_memory(tmp_path, monkeypatch):
    import os

    monkeypatch.delenv(BUCKET, raising=False)
    chosen = options(enable_ssd_offload=True, ssd_offload_path=str(tmp_path), global_segment_size=256 * MIB)
    ssd.arguments(chosen, StoreContext(), {})
    assert os.environ[BUCKET] == str(32 * MIB)
    ssd.good_bye(ssd.folder_of(chosen, StoreContext()))
    monkeypatch.setenv(BUCKET, "5")
    ssd.arguments(chosen, StoreContext(), {})
    assert os.environ[BUCKET] == "5", "what the user set stays"
    monkeypatch.delenv(BUCKET)


def test_a_client_waits_for_the_end_of_a_dead_one(tmp_path):
    chosen = options(enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    folder = ssd.folder_of(chosen, StoreContext())
    folder.mkdir()
    for prepare, least, most in ((ssd.sign_of_life, 1.5, 20.0), (ssd.good_bye, 0.0, 1.4)):
        prepare(folder)
        begun = time.monotonic()
        ssd.arguments(chosen, StoreContext(), {CLIENT_TTL: "0.2"})
        assert least <= time.monotonic() - begun <= most
        ssd.let_go(folder)
    with pytest.raises(ValueError, match='KVPOOL_MOONCAKE_CLIENT_TTL="soon"'):
        ssd.arguments(chosen, StoreContext(), {CLIENT_TTL: "soon"})


def test_bc_151_gets_fit_into_the_read_buffer_together():
    env = {"MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(MIB)}
    assert ssd.read_limit(env, 4) * 4 <= MIB * 0.9
    store = MooncakeStore(options(enable_ssd_offload=True), StoreContext())
    assert store.limits.batch_bytes * store.limits.transfer_threads <= 1342177280 * 0.9


def lease_client(seconds, calls, clock):
    granted = []

    def answer(work):
        client = SimpleNamespace(
            put=lambda *_: 0,
            batch_is_exist=lambda _: (granted.append(clock[0]), [1])[1],
            remove=lambda *_: (calls.append(1), 0 if clock[0] > granted[0] + seconds else codes.LEASED)[1],
        )
        return work(client)

    return answer


def test_the_measured_lease_is_never_longer_than_the_lease(monkeypatch):
    calls, clock = [], [100.0]
    monkeypatch.setattr(lease_ttl, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait(seconds):
        clock[0] += seconds

    seconds = lease_ttl.measure(lease_client(0.5, calls, clock), "k", None, wait)
    assert 0.35 <= seconds <= 0.5
    assert len(calls) < 40


def test_what_is_longer_than_a_lease_is_named():
    env = {"ASCEND_CONNECT_TIMEOUT": "11000", "ASCEND_TRANSFER_TIMEOUT": "9000"}
    line = lease_ttl.complaint(10.0, 30.0, env)
    assert "ASCEND_CONNECT_TIMEOUT=11000 ms and the load deadline of 30 s" in line
    assert "ASCEND_TRANSFER" not in line
    assert lease_ttl.complaint(31.0, 30.0, env) == ""
    assert lease_ttl.complaint(31.0, 30.0, env, ascend=True) == ""
    assert "a transfer may take (33064 ms" in lease_ttl.complaint(31.0, 30.0, {}, ascend=True)


def test_the_lease_of_the_trial_service_outlasts_loads_and_transfers_also_as_it_is_measured():
    least_s = MasterOptions().lease_s * 0.95
    assert least_s * 1000 > max(AscendStoreOptions().load_timeout_ms, transfer_timeout_ms({}))


class LyingClient:
    """Says 0 to every put, and answers lookups as told."""

    there: ClassVar[dict] = {}

    def batch_is_exist(self, names):
        return [self.there.get(name, 0) for name in names]

    def batch_get_replica_desc(self, names):
        place = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=64 + 16))
        return {n: [SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: place)] for n in names}

    def batch_put_from_multi_buffers(self, names, *_):
        return [0] * len(names)

    def batch_get_into_multi_buffers(self, names, *_):
        return [80] * len(names)  # and writes nothing

    def get_hostname(self):
        return "h"

    def remove(self, name, force):
        self.removed = name
        return 0

    def health_check(self):
        return 2

    def close(self):
        return 0


@pytest.fixture
def lying(monkeypatch):
    made = MooncakeStore(options(), StoreContext(role="tool"))
    client = LyingClient()

    def connected():
        made._client = client
        made._library = SimpleNamespace(put_config=lambda **_: None, has_ranges=True)

    monkeypatch.setattr(made, "_connect", connected)
    made.open()
    yield made, client
    made.close()


def batch(memory):
    return Batch([b"k"], np.array([[memory.ctypes.data]], dtype=np.int64), np.array([64], dtype=np.int64))


@pytest.mark.parametrize(("device", "protocol", "sealed"), [
    ("cpu", "tcp", True), ("cpu", "rdma", False), ("cuda", "tcp", False), ("npu", "ascend", False),
])  # fmt: skip
def test_checksums_only_where_their_memory_needs_no_registration(device, protocol, sealed):
    store = MooncakeStore(options(protocol=protocol), StoreContext(device=device))
    assert store.checksums is sealed
    assert store._no_link().trailer is sealed
    assert store._no_link().host is sealed, "a copy of an object on a disk lies in such memory"
    assert store._takes_host_memory() is sealed


def test_a_put_counts_only_when_it_can_be_read(lying):
    store, _ = lying
    handle = store.put(batch(np.zeros(64, dtype=np.uint8)), 1.0)
    assert handle.wait(30)
    assert handle.results()[0].status is Status.BUSY


def test_lookups_that_cannot_tell_are_unknown(lying):
    store, client = lying
    client.there = {"a": 1, "b": 0, "c": -900}
    assert [type(a) if isinstance(a, Hit) else a for a in store.exists([b"a", b"b", b"c"])] == [Hit, MISS, UNKNOWN]
    assert store.exists([b"a"])[0].nbytes == 64
    assert not store.health().ok


def test_bytes_that_do_not_match_are_missing_and_removed(lying):
    store, client = lying
    handle = store.get(batch(np.ones(64, dtype=np.uint8)), 1.0)
    assert handle.wait(30)
    assert handle.results()[0].status is Status.MISSING
    assert client.removed == "k"
    assert store.damaged_objects == 1


class SetUpClient(LyingClient):
    def setup(self, *arguments, **extra):
        self.arguments, self.extra = arguments, extra
        return 0

    def register_buffer(self, address, nbytes):
        self.registered = [*getattr(self, "registered", []), (address, nbytes)]
        return 0

    def put(self, *_):
        return 0


def set_up(monkeypatch, env=None, context=None, **changes):
    """The client after connect, with what it was set up with."""
    monkeypatch.setattr(connect, "reach", lambda address: "10.0.0.7")
    client = SetUpClient()
    connect.connect(SimpleNamespace(client=lambda: client), options(**changes), context or StoreContext(), env or {})
    return client


def test_only_workers_and_owners_give_memory(monkeypatch):
    for role, given in (("worker", 64 * MIB), ("owner", 64 * MIB), ("scheduler", 0), ("tool", 0)):
        client = set_up(monkeypatch, context=StoreContext(role=role), global_segment_size=64 * MIB)
        assert client.arguments[:3] == ("10.0.0.7", "P2PHANDSHAKE", given)


def test_what_old_versions_do_not_know_is_not_passed(monkeypatch):
    assert set_up(monkeypatch).extra == {}
    assert set_up(monkeypatch, tenant_id="a").extra == {"tenant_id": "a"}


def test_fabric_memory_has_no_buffer_and_registers_nothing(monkeypatch):
    npu = StoreContext(device="npu")
    for fabric, buffer, count in (("1", 0, 0), ("0", 5 * MIB, 2)):
        monkeypatch.setenv("ASCEND_ENABLE_USE_FABRIC_MEM", fabric)
        client = set_up(monkeypatch, {"ASCEND_ENABLE_USE_FABRIC_MEM": fabric}, npu, protocol="ascend", local_buffer_size=5 * MIB)
        assert client.arguments[3] == buffer
        store = MooncakeStore(options(protocol="ascend"), npu)
        assert not store.checksums
        assert store.capabilities.device_memory

        def connected(store=store, client=client):
            store._client, store._library = client, SimpleNamespace(put_config=lambda **_: None, has_ranges=True)

        monkeypatch.setattr(store, "_connect", connected)
        store.open()
        for _ in range(2):
            store.register([(4096, 10), (8192, 20)])
        assert len(getattr(client, "registered", [])) == count
        store.close()


def test_waits_of_the_library_are_bounded_unless_the_user_says_otherwise(monkeypatch):
    import os

    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7000")
    monkeypatch.delenv("MC_STORE_CLIENT_SETUP_RETRIES", raising=False)
    set_up(monkeypatch)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "7000"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "3"
