"""The few moves that every test of the disk tier makes. Objects describe themselves: every byte that is read is verified."""

import shutil

from kvpool.stores.base import Hit
from tests.chaos import store_worker as sw
from tests.waiting import eventually

SIZE = sw.CLASSES[2]


def put(store, numbers, nbytes=SIZE):
    worker = sw.Worker(store, 1)
    for start in range(0, len(numbers), 4):
        worker.put(numbers[start : start + 4], nbytes)
    assert worker.counts["put"] == len(numbers), worker.counts


def get(store, numbers, nbytes=SIZE):
    """How many of the objects are there; their bytes are verified."""
    worker = sw.Worker(store, 1)
    for start in range(0, len(numbers), 4):
        worker.get(numbers[start : start + 4], nbytes)
    return worker.counts["hit"]


def tiers(store, numbers, nbytes=SIZE):
    return [answer.tier if isinstance(answer, Hit) else None for answer in store.exists([sw.key(n, nbytes) for n in numbers])]


def on_disk(store, count):
    eventually(lambda: store.stats().tiers[1].objects >= count, f"{count} objects are on the disk")


def spilled(store, count=80):
    """Objects 0 .. count, more than the memory holds; none was dropped."""
    for start in range(0, count, 4):
        put(store, list(range(start, start + 4)))
        on_disk(store, max(0, start - 8))
    assert store.stats().tiers[1].dropped_objects == 0
    return list(range(count))


def wiped(store, root):
    """What a reboot leaves: nothing in memory."""
    store.close()
    shutil.rmtree(root / "chaos")
