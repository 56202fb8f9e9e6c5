"""The files of a pool are deleted under processes that use it. Every byte that is read is verified."""

import shutil

from tests.chaos.test_local_store import Process, no_process_is_left  # noqa: F401 - a fixture


def test_a_pool_deleted_under_load_gives_no_wrong_bytes(pool_root):
    workers = [Process("work", pool_root, seed, wanted=("transient",)) for seed in range(4)]
    for worker in workers:
        worker.ready().says("warm")
    shutil.rmtree(pool_root / "chaos")
    for worker in workers:
        worker.finish()  # once puts are refused, since the pool is gone
