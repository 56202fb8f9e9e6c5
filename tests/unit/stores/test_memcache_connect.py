"""How the MemCache store finds, starts and leaves its library, with libraries that are slow, fail or are old."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from tests.waiting import eventually

from kvpool.options.memcache_conf import read_local_conf
from kvpool.stores.context import StoreContext
from kvpool.stores.memcache import MemcacheStore, connect, library
from kvpool.stores.memcache.metrics import metrics_url

LOCAL = "ock.mmc.local_service"


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setenv("MMC_LOCAL_CONFIG_PATH", "")
    for name in ("_loaded_with", "_shared", "_starting", "_given_up"):
        monkeypatch.setattr(connect, name, None)
    monkeypatch.setattr(connect, "at_exit", lambda open_client, starting: None)


def store_at(port: int, **options) -> MemcacheStore:
    text = f"ock.mmc.meta_service_url = tcp://127.0.0.1:{port}\n{LOCAL}.config_store_url = tcp://127.0.0.1:{port}\n"
    return MemcacheStore(read_local_conf(text, "mmc-local.conf").options, StoreContext(), "mmc-local.conf", **options)


def test_no_meta_service_is_one_line_within_the_deadline(monkeypatch):
    monkeypatch.setattr(connect, "load", lambda ssd: None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(OSError, match=rf"nobody answers at tcp://127.0.0.1:{port}.*is the MetaService running"):
            store_at(port, connect_s=1.0).open()
        assert time.monotonic() - began < 15


class SlowModule:
    """A library whose init waits until it may go on, or fails, and whose lookups wait while it is silent."""

    def __init__(self, code: int = 0, started: bool = True) -> None:
        self.code, self.started, self.speaks, self.closed = code, threading.Event(), threading.Event(), threading.Event()
        self.speaks.set()
        self.begun = 0
        if started:
            self.started.set()

    def DistributedObjectStore(self):
        return self

    def init(self, device_id, init_bm=True):
        self.begun += 1
        self.started.wait(60)
        return self.code

    def batch_is_exist(self, keys):
        self.speaks.wait(60)
        return [0] * len(keys)

    def close(self):
        self.closed.set()


def opens(store: MemcacheStore) -> bool:
    try:
        store.open()
    except OSError as error:
        if "has not ended yet" not in str(error):
            raise
        return False
    return True


def test_a_start_that_takes_too_long_is_given_up_and_serves_the_next_store(monkeypatch):
    """Closing what started late could stop every thread of this process."""
    module = SlowModule(started=False)
    monkeypatch.setattr(connect, "load", lambda ssd: module)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=r"did not start within 2 s"):
            store_at(port, connect_s=2.0).open()
        with pytest.raises(OSError, match=r"has not ended yet"):
            store_at(port, connect_s=2.0).open()
        module.started.set()
        store = store_at(port, connect_s=30.0)
        eventually(lambda: opens(store), "the late start has ended")
        assert module.begun == 1
        assert not module.closed.is_set()
        with pytest.raises(OSError, match=r"cannot use other.conf at the same time"):
            MemcacheStore(store._options, StoreContext(), "other.conf").open()
        store.close()
        assert module.closed.is_set()


def test_the_end_of_the_process_finds_what_started_late(monkeypatch):
    module = SlowModule(started=False)
    monkeypatch.setattr(connect, "load", lambda ssd: module)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(OSError, match=r"did not start within 2 s"):
            store_at(server.getsockname()[1], connect_s=2.0).open()
        assert connect._open_client() is None
        module.started.set()
        assert eventually(connect._open_client, "the late start has ended") is module


def test_bc_095_a_start_that_fails_says_with_which_file_and_code(monkeypatch):
    module = SlowModule(code=-1)
    monkeypatch.setattr(connect, "load", lambda ssd: module)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=r"does not start with mmc-local.conf: code -1"):
            store_at(port, connect_s=30.0).open()


def test_a_client_whose_meta_service_is_silent_is_not_closed_but_taken_over(monkeypatch):
    """Closing it would stop every thread of this process for minutes."""
    module = SlowModule()
    monkeypatch.setattr(connect, "load", lambda ssd: module)
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = store_at(server.getsockname()[1], connect_s=30.0)
        store.open()
        module.speaks.clear()
        began = time.monotonic()
        store.close()
        assert time.monotonic() - began < 20
        assert not module.closed.is_set()
        module.speaks.set()
        store.open()
        store.close()
        assert module.closed.is_set()


@pytest.mark.parametrize(
    ("protocol", "context", "taken"),
    [
        ("host_shm", StoreContext(), True),
        ("host_tcp", StoreContext(), False),
        ("host_shm", StoreContext(role="scheduler"), False),
        ("device_sdma", StoreContext(device="npu"), False),
    ],
)
def test_notes_need_memory_that_is_not_registered(protocol, context, taken):
    text = f"ock.mmc.meta_service_url = tcp://127.0.0.1:1\n{LOCAL}.config_store_url = tcp://127.0.0.1:1\n"
    options = read_local_conf(text, "mmc-local.conf").options.model_copy(update={"protocol": protocol})
    assert MemcacheStore(options, context, "mmc-local.conf")._takes_host_memory() is taken


def test_the_meta_service_is_asked_where_its_file_says(tmp_path):
    conf = tmp_path / "mmc-meta.conf"
    lines = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.meta_service.config_store_url = tcp://h:6000\n"
    conf.write_text(lines + "ock.mmc.meta_service.metrics_url = http://h:8000\n")
    env = {"MMC_META_CONFIG_PATH": str(conf)}
    assert metrics_url(env, "tcp://h:5000") == "http://h:8000"
    assert metrics_url(env, "tcp://other:5000") is None
    assert metrics_url({}, "tcp://h:5000") is None
    conf.write_text(lines + "ock.mmc.meta_service.metrics_url = https://h:8000\n")
    assert metrics_url(env, "tcp://h:5000") is None
    conf.unlink()
    assert metrics_url(env, "tcp://h:5000") is None


def test_an_old_library_is_refused_with_ssd_only(monkeypatch):
    monkeypatch.setattr(library, "version", lambda name: "1.1.3")
    monkeypatch.setattr(library.importlib, "import_module", lambda name: name)
    with pytest.raises(OSError, match=r"memcache-hybrid 1.1.3 has no SSD tier: install 1.2.0 or newer"):
        library.load(ssd=True)
    assert library.load(ssd=False) == "memcache_hybrid"
    monkeypatch.setattr(library, "version", lambda name: "1.2.0.rc1")
    assert library.load(ssd=True) == "memcache_hybrid"


def test_bc_161_qos_reaches_the_library(monkeypatch):
    monkeypatch.setattr(connect, "load", lambda ssd: SlowModule())
    monkeypatch.setenv("MF_DEVICE_UB_QOS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = store_at(server.getsockname()[1], qos_priority=3)
        store.open()
        store.close()
    assert os.environ["MF_DEVICE_UB_QOS"] == "3"
