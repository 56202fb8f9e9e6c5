"""The files of a pool are deleted under processes that use it. Every byte that is read is verified."""

import shutil
import time

from tests.chaos.test_local_store import Process, no_process_is_left  # noqa: F401 - a fixture


def test_a_pool_deleted_under_load_gives_no_wrong_bytes(pool_root):
    workers = [Process("work", pool_root, 8, seed) for seed in range(4)]
    for worker in workers:
        worker.ready()
    time.sleep(1)
    shutil.rmtree(pool_root / "chaos")
    counts = [worker.finish() for worker in workers]
    assert all(count["hit"] > 50 for count in counts), counts
    assert all(count["transient"] > 0 for count in counts), "puts are refused once it is gone"
