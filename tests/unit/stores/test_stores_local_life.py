"""Making, joining, leaving and refusing pools."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.stores.helpers import GRANULE, get, has, key, opened, put

from kvpool.stores import build_store
from kvpool.stores.base import Status
from kvpool.stores.local import LocalStore, pool_dir

SIZE = 64 * GRANULE


def test_contents_survive_a_restart(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")], fill=7)
    store.close()
    again = opened(pool_root, SIZE)
    assert get(again, [key("a")]) == [7]
    again.close()


def test_first_openers_size_wins(pool_root):
    store = opened(pool_root, SIZE)
    with pytest.raises(ValueError, match=rf"dram_bytes={SIZE}.*dram_bytes={2 * SIZE}"):
        opened(pool_root, 2 * SIZE)
    joined = opened(pool_root, None)
    assert joined.stats().capacity_bytes == SIZE
    joined.close()
    store.close()


def test_joining_what_is_not_there(pool_root):
    with pytest.raises(FileNotFoundError, match="no pool 'unit'"):
        opened(pool_root, None)
    assert list(pool_root.iterdir()) == []


@pytest.mark.parametrize("damage", ["{", '{"format": 2}', '{"format": 2, "dram_bytes": 4096, "chunk_bytes": 0}', "[]", ""])
def test_damaged_meta_says_what_to_do(pool_root, damage):
    opened(pool_root, SIZE).close()
    (pool_root / "unit" / "meta").write_text(damage)
    with pytest.raises(ValueError, match="damaged; stop its users, delete the directory"):
        opened(pool_root, SIZE)


def test_another_format_says_what_to_do(pool_root):
    opened(pool_root, SIZE).close()
    meta = pool_root / "unit" / "meta"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(ValueError, match=r"format 99.*delete the directory"):
        opened(pool_root, SIZE)


def test_a_pool_of_an_older_format_is_emptied_unless_it_is_in_use(pool_root, caplog):
    store = opened(pool_root, SIZE)
    put(store, [key("a")], fill=5)
    meta = pool_root / "unit" / "meta"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 1}))
    (pool_root / "unit" / "index" / "lock.mdb").touch()
    with pytest.raises(OSError, match=r"in use by processes of another version.*format 1, this one of format 2"):
        opened(pool_root, SIZE)
    assert get(store, [key("a")]) == [5]
    store.close()
    store = opened(pool_root, SIZE)
    assert has(store, [key("a")]) == [False]
    assert "older version of kvpool: emptied" in caplog.text
    assert not (pool_root / "unit" / "index" / "lock.mdb").exists()
    assert json.loads(meta.read_text())["format"] == 2
    store.close()


def test_a_pool_from_before_a_reboot_is_emptied(pool_root, caplog):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    store.close()
    meta = pool_root / "unit" / "meta"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "boot": "another"}))
    store = opened(pool_root, SIZE)
    assert has(store, [key("a")]) == [False]
    assert "emptied" in caplog.text
    store.close()


def test_a_half_made_pool_is_made_anew(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    store.close()
    (pool_root / "unit" / "meta").unlink()
    store = opened(pool_root, SIZE)
    assert store.stats().objects == 0
    assert put(store, [key("a")]) == [Status.OK]
    store.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".x", "a" * 65, "a b", "a\n"])
def test_names_that_could_leave_the_root(pool_root, name):
    with pytest.raises(ValueError, match="pool name"):
        opened(pool_root, SIZE, name)


def test_links_and_loose_modes_are_refused(pool_root):
    (pool_root / "real").mkdir(mode=0o700)
    (pool_root / "unit").symlink_to(pool_root / "real")
    with pytest.raises(OSError, match="symbolic link"):
        opened(pool_root, SIZE)
    (pool_root / "open").mkdir()
    (pool_root / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="mode 777"):
        opened(pool_root, SIZE, "open")


@pytest.mark.parametrize("file", ["meta", "arena", "stamps", "lock"])
def test_a_link_in_place_of_a_file_is_refused(pool_root, file):
    opened(pool_root, SIZE).close()
    path = pool_root / "unit" / file
    path.rename(pool_root / "elsewhere")
    path.symlink_to(pool_root / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        opened(pool_root, SIZE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own a directory as somebody else")
def test_a_strangers_directory_is_refused(pool_root):
    (pool_root / "unit").mkdir(mode=0o700)
    os.chown(pool_root / "unit", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to uid 12345"):
        opened(pool_root, SIZE)


def test_on_last_close_remove(pool_root):
    one, two = (opened(pool_root, SIZE, on_last_close="remove") for _ in range(2))
    one.close()
    assert put(two, [key("a")]) == [Status.OK]
    two.close()
    assert list(pool_root.iterdir()) == []
    with pytest.raises(ValueError, match="accepted: keep, remove"):
        LocalStore(pool_root, "unit", SIZE, on_last_close="burn")


def test_removal_and_joining_race(pool_root):
    """Processes that join while the last one removes the pool find a whole pool, every time."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.unit.stores.helpers import opened, put, key\n"
        "for turn in range(25):\n"
        "    store = opened(Path(sys.argv[1]), 262144, on_last_close='remove')\n"
        "    statuses = put(store, [key(turn)])\n"
        "    assert statuses[0].value in ('ok', 'exists', 'busy'), statuses\n"
        "    assert store.verify() == []\n"
        "    store.close()\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script, str(pool_root)]
    runs = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for run in runs:
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
    assert list(pool_root.iterdir()) == []


def test_a_dead_clients_slots_come_back_at_open(pool_root):
    root = Path(__file__).parents[3]
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.stores.helpers import opened\n"
        "store = opened(Path(sys.argv[1]), 262144)\n"
        "assert len(store.reserve(10, 4096, 5.0)) == 10\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(pool_root)], cwd=root, check=False)
    assert run.returncode == -signal.SIGKILL
    store = opened(pool_root, SIZE)
    stats = store.stats()
    assert (stats.writing, stats.used_bytes) == (0, 0)
    assert len(list((pool_root / "unit" / "clients").iterdir())) == 1
    store.close()


def test_a_forked_child_touches_nothing(pool_root):
    store = opened(pool_root, SIZE)
    put(store, [key("a")])
    lease = store.lease([key("a")], 60.0)
    pid = os.fork()
    if pid == 0:
        try:
            fine = put(store, [key("b")]) == [Status.FATAL] and not any(has(store, [key("a")])) and not store.health().ok
            store.release(lease)
            store.close()
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.stats().leases == 1
    assert put(store, [key("b")]) == [Status.OK]
    store.close()


def test_a_forked_child_does_not_keep_its_dead_parent_alive(pool_root):
    root = Path(__file__).parents[3]
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from tests.unit.stores.helpers import opened\n"
        "store = opened(Path(sys.argv[1]), 262144)\n"
        "store.reserve(10, 4096, 5.0)\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "time.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(pool_root)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    run.wait(60)
    try:
        store = opened(pool_root, SIZE)
        assert store.stats().writing == 0
        store.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_slots_of_a_store_are_its_own(pool_root):
    one, two = opened(pool_root, SIZE), opened(pool_root, SIZE)
    slots = one.reserve(1, GRANULE, 5.0)
    with pytest.raises(ValueError, match="another store"):
        two.publish([(slots[0], key("a"))], 5.0)
    one.close()
    assert two.stats().writing == 0, "slots of a store that closed are free"
    two.close()


def test_build_store(pool_root):
    store = build_store("local", root=pool_root, name="n", dram_bytes=SIZE, on_last_close="remove", device="cpu")
    store.open()
    assert put(store, [key("a")]) == [Status.OK]
    store.close()
    with pytest.raises(ValueError, match="'floppy' is unknown"):
        build_store("floppy")
    with pytest.raises(ValueError, match="no option 'dram'"):
        build_store("local", dram=1)
    with pytest.raises(ValueError, match="no copy engine"):
        build_store("local", dram_bytes=SIZE, device="abacus")


def test_too_many_open_files_is_one_line(pool_root):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in used), 5)  # the limit is on the numbers
    resource.setrlimit(resource.RLIMIT_NOFILE, (list(free)[-1] + 1, hard))
    try:
        with pytest.raises(OSError, match=r"Too many open files|index cannot be opened"):
            opened(pool_root, SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    opened(pool_root, SIZE).close()
    assert len(os.listdir("/proc/self/fd")) <= len(used) + 1


def test_a_directory_that_goes_while_it_is_opened_is_made_again(pool_root, monkeypatch):
    """The last user of a pool removes it between the mkdir and the open of one that joins."""
    real, gone = pool_dir.open_dir, []

    def vanishing(path, **more):
        if path.name == "unit" and not gone:
            gone.append(path)
            raise FileNotFoundError(2, "gone")
        return real(path, **more)

    monkeypatch.setattr(pool_dir, "open_dir", vanishing)
    store = opened(pool_root, SIZE)
    assert gone
    assert put(store, [key(1)]) == [Status.OK]
    store.close()


def test_a_root_that_cannot_be_made_is_an_error_at_once(pool_root):
    before = time.monotonic()
    with pytest.raises(FileNotFoundError, match="there is no pool"):
        opened(pool_root / "no" / "such", SIZE)
    assert time.monotonic() - before < 10


def test_a_fork_in_the_middle_of_a_look_does_not_keep_the_dead_alive(pool_root, monkeypatch):
    """The child has the descriptor by which its parent looked."""
    store, close, inherited = opened(pool_root, SIZE), os.close, []

    def close_after_fork(fd: int) -> None:
        inherited.append(os.dup(fd))
        close(fd)

    dead = pool_root / "unit" / "clients" / f"{7:016x}"
    dead.touch(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_after_fork)
        assert store.users() == 1
    with open(dead, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in inherited:
        os.close(fd)
    store.close()
