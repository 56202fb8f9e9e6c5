"""The embedded store where memory is short: a small tmpfs, and none at all."""

import errno
import os

import pytest

from kvpool.stores.local import LocalStore, arena
from tests.chaos import store_worker as sw
from tests.chaos.test_local_store import settled
from tests.mounts import mounted


@pytest.fixture
def small_tmpfs(tmp_path):
    """A tmpfs of 12 MiB."""
    with mounted(tmp_path / "small", "tmpfs", "size=12m,mode=700") as folder:
        yield folder


def shrunken(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    worker = sw.Worker(store, 9)
    for start in range(0, sw.KEYS, 4):
        worker.put(list(range(start, start + 4)), sw.CLASSES[0])
    warnings = [record for record in caplog.records if "shrinks" in record.message]
    assert len(warnings) == 1, [record.message for record in caplog.records]
    stats = store.stats()
    assert 0 < stats.used_bytes <= stats.capacity_bytes < sw.POOL_BYTES
    assert worker.counts["transient"] == 0
    worker.get(list(range(sw.KEYS - 8, sw.KEYS)), sw.CLASSES[0])
    assert worker.counts["hit"] == 8
    settled(store)


def test_tmpfs_smaller_than_the_pool(small_tmpfs, caplog):
    store = sw.open_store(str(small_tmpfs))
    shrunken(store, caplog)
    os.posix_fallocate(os.open(small_tmpfs / "filler", os.O_RDWR | os.O_CREAT), 0, os.statvfs(small_tmpfs).f_bavail * 4096)
    worker = sw.Worker(store, 10)
    for _ in range(100):
        worker.turn()  # not one byte is left: errors are answers, never a SIGBUS
    store.close()


def test_no_memory_for_the_arena(pool_root, caplog, monkeypatch):
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        if nbytes >= 128 << 10 and offset >= sw.POOL_BYTES // 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, nbytes)

    monkeypatch.setattr(arena, "allocate", refuse)
    store = sw.open_store(str(pool_root))
    shrunken(store, caplog)
    store.close()


def test_no_memory_at_all(pool_root, monkeypatch):
    store = sw.open_store(str(pool_root))

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arena, "allocate", refuse)
    worker = sw.Worker(store, 1)
    worker.put([0, 1, 2, 3], sw.CLASSES[0])
    assert worker.counts["no_space"] == 4
    assert not store.health().ok
    assert store.stats().capacity_bytes == 0
    store.close()
