"""One of several clients that start at the same moment: stores its own object, waits for the others, reads all of theirs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvpool.options.deployment import UNKNOWN
from kvpool.options.mooncake_json import read_mooncake
from kvpool.stores.base import Hit, Status
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore
from tests.stores.mooncake_pool import get, key, put

NBYTES = 64 << 10


def main(path: str, me: int, count: int, start: float, folder: str) -> None:
    options = read_mooncake(Path(path).read_text(), path, {}, UNKNOWN).options
    store = MooncakeStore(
        options.model_copy(update={"global_segment_size": 16 << 20, "preferred_segment": True}), StoreContext(rank=me)
    )
    time.sleep(max(0.0, start - time.time()))
    store.open()
    name = store._client.get_hostname()  # type: ignore[union-attr]
    assert [result.status for result in put(store, [f"client-{me}"], NBYTES)] == [Status.OK]
    everybody = [f"client-{i}" for i in range(count)]
    end = time.monotonic() + 120
    while not all(isinstance(answer, Hit) for answer in store.exists([key(each) for each in everybody])):
        assert time.monotonic() < end, "the others did not come"
        time.sleep(0.05)
    assert [result.status for result in get(store, everybody, NBYTES)] == [Status.OK] * count
    print(name, flush=True)
    mark = Path(folder)
    (mark / str(me)).touch()
    while len(list(mark.iterdir())) < count and time.monotonic() < end:
        time.sleep(0.05)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
