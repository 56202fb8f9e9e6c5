"""A folder of Mooncake's disk tier has one user at a time, and every process its own folder."""

import fcntl
import os
import stat
from types import SimpleNamespace

import pytest

from kvpool.ops.services import mooncake_owner
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_ssd import BUCKET, CLIENT_TTL, HEARTBEAT
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore, connect, ssd
from kvpool.stores.mooncake import store as store_module

MIB = 1 << 20


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (BUCKET, HEARTBEAT, *connect.BOUNDS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(connect, "reach", lambda address: "10.0.0.7")
    made = MooncakeOptions(master_server_address="127.0.0.1:1", protocol="tcp", global_segment_size=16 * MIB)
    yield made.model_copy(update={"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)})
    for path in tmp_path.iterdir():
        ssd.let_go(path)


def is_locked(folder):
    fd = os.open(folder / ssd.LOCK, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Client:
    def __init__(self, code=0, error=None):
        self.code, self.error, self.closed = code, error, False

    def setup(self, *arguments, **extra):
        return self.code

    def put(self, *_):
        if self.error is not None:
            raise self.error
        return 0

    def remove(self, *_):
        return 0

    def close(self):
        self.closed = True
        return 0


def library(client):
    return SimpleNamespace(client=lambda: client, put_config=lambda **_: None, has_ranges=True)


def test_a_folder_in_use_is_refused_and_named(options):
    folder = ssd.folder_of(options, StoreContext())
    ssd.arguments(options, StoreContext(), {})
    assert stat.S_IMODE((folder / ssd.LOCK).stat().st_mode) == 0o600
    for _ in range(2):  # the one that is refused does not unlock it
        with pytest.raises(ValueError, match=rf"{folder} .*give each engine and owner an ssd_offload_path of its own"):
            connect.connect(library(Client()), options, StoreContext(), {})
    ssd.good_bye(folder)
    connect.connect(library(Client()), options, StoreContext(), {})


def test_a_link_in_place_of_the_lock_is_not_followed(options, tmp_path):
    folder = ssd.folder_of(options, StoreContext())
    folder.mkdir()
    (folder / ssd.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        ssd.arguments(options, StoreContext(), {})
    assert not (tmp_path / "elsewhere").exists()


def test_errors_of_a_start_unlock_the_folder(options):
    folder = ssd.folder_of(options, StoreContext())
    with pytest.raises(ValueError, match="CLIENT_TTL"):
        ssd.arguments(options, StoreContext(), {CLIENT_TTL: "soon"})
    assert not is_locked(folder)
    with pytest.raises(OSError, match="code -1"):
        connect.connect(library(Client(code=-1)), options, StoreContext(), {})
    assert not is_locked(folder)


@pytest.mark.parametrize("error", [OSError("no"), RuntimeError("no")])
def test_a_store_that_does_not_open_unlocks_its_folder(options, monkeypatch, error):
    client = Client(error=error)
    monkeypatch.setattr(store_module, "load", lambda *_, **__: library(client))
    with pytest.raises(type(error)):
        MooncakeStore(options, StoreContext()).open()
    assert client.closed
    assert not is_locked(ssd.folder_of(options, StoreContext()))


def test_the_folder_is_locked_until_the_store_is_closed(options, monkeypatch):
    monkeypatch.setattr(store_module, "load", lambda *_, **__: library(Client()))
    store, folder = MooncakeStore(options, StoreContext()), ssd.folder_of(options, StoreContext())
    store._connect()
    assert is_locked(folder)
    store._disconnect()
    assert not is_locked(folder)


def test_owners_have_folders_of_their_own(options):
    folders = [ssd.folder_of(options, StoreContext(role=role, rank=rank)).name for role in ("worker", "owner") for rank in (0, 1)]
    assert folders == ["rank_0", "rank_1", "owner_0", "owner_1"]


def test_an_owner_opens_its_store_under_its_own_number(tmp_path, monkeypatch):
    class OpenedError(Exception):
        pass

    def opened(options, context):
        raise OpenedError(context)

    monkeypatch.setattr(mooncake_owner, "MooncakeStore", opened)
    monkeypatch.setattr(mooncake_owner.signal, "signal", lambda *_: None)
    monkeypatch.setattr(mooncake_owner, "read_mooncake", lambda *_: SimpleNamespace(options=None, warnings=[]))
    (tmp_path / "owner.json").write_text("{}")
    for arguments, number in (([], 0), (["3"], 3)):
        with pytest.raises(OpenedError) as raised:
            mooncake_owner.main(str(tmp_path / "owner.json"), str(tmp_path / "ready"), *arguments)
        assert raised.value.args == (StoreContext(role="owner", rank=number),)
