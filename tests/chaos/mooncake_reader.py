"""A process that reads objects of a Mooncake pool with several threads, whole and in pieces, and counts what came of it.

Usage: CONFIG START NAME...: begins at START (seconds since the epoch), prints one JSON object {"whole": {...}, "pieces": {...}}."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from kvpool.options.deployment import UNKNOWN
from kvpool.options.mooncake_json import read_mooncake
from kvpool.stores.base import Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore
from tests.stores.mooncake_pool import MIB, content, get, key

THREADS = 4
AT_ONCE = 3  # objects of one get
DEADLINE = 45.0


def read_piecewise(store: MooncakeStore, name: str) -> str:
    """ "ok", "wrong bytes", or what the store said."""
    reader = store.begin_read([key(name)], DEADLINE)
    got = np.zeros(MIB, dtype=np.uint8)
    results = [reader.read([0], start, np.array([[got.ctypes.data + start]]), np.array([MIB // 2])) for start in (0, MIB // 2)]
    reader.end()
    bad = [result for (result,) in results if result.status is not Status.OK]
    if bad:
        return f"{bad[0].status.name} {bad[0].code} {bad[0].text}"
    return "ok" if np.array_equal(got, content(name, MIB)) else "wrong bytes"


def main(config: str, start: float, names: list[str]) -> None:
    store = MooncakeStore(read_mooncake(Path(config).read_text(), config, {}, UNKNOWN).options, StoreContext(role="tool"))
    store.open()
    whole: Counter[str] = Counter()
    pieces: Counter[str] = Counter()

    def read(number: int) -> None:
        mine = names[number:] + names[:number]  # each thread begins somewhere else
        for first in range(0, len(mine), AT_ONCE):
            for result in get(store, mine[first : first + AT_ONCE], deadline_s=DEADLINE):
                whole[f"{result.status.name} {result.code} {result.text}" if result.status is not Status.OK else "ok"] += 1
        for name in mine[:2]:
            pieces[read_piecewise(store, name)] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(THREADS)]
    time.sleep(max(0.0, start - time.time()))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    print(json.dumps({"whole": whole, "pieces": pieces}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
