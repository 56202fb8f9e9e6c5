"""What the tests of the index's readers run in processes of their own, on an index without the rest of a pool.

Usage: index_worker.py ROLE FOLDER GUARD. A writer rewrites all keys in each transaction, with one version; a reader takes its time
over a snapshot, and each value must be of its key, all of one version. GUARD ``off``: writers do not look at the readers.
Each prints ``ready``, begins at the first byte of its input, and takes turns until that ends, TURNS at least; then it prints one
JSON line of counts.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import time
from pathlib import Path

from kvpool.stores.local import index
from kvpool.stores.local.fence import make_fence
from kvpool.stores.local.index import LmdbTransaction
from kvpool.stores.local.readers import TABLE_BYTES, Readers
from kvpool.stores.local.write_lock import WriteLock

KEYS = [f"key{number:04d}".encode() for number in range(150)]
VALUE = struct.Struct("<QI")
TURNS = 100


class Index:
    def __init__(self, folder: Path) -> None:
        """Made by the first; not by two at once."""
        (folder / "index").mkdir(exist_ok=True)
        self.environment = index.acquire(folder / "index", 64 << 20)
        self.env = self.environment.env
        table = folder / "readers"
        fds = [os.open(table, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for _ in range(2)]
        os.posix_fallocate(fds[0], 0, TABLE_BYTES)
        fence = make_fence()
        self.readers = Readers(*fds, fence)
        self.lock = WriteLock(os.open(folder / "index" / "data.mdb", os.O_RDWR | os.O_CLOEXEC), self.env, self.readers, fence)

    def write(self, patience_s: float = 30.0) -> None:
        """One transaction: all keys of the next version. Abandoned when readers forbid it for too long."""
        with (
            self.lock.held(lambda waited: "forbidden" if waited > patience_s else None) as version,
            self.env.begin(write=True) as txn,
        ):
            assert txn.id() == version, f"{txn.id()} is not {version}"
            for number, key in enumerate(KEYS):
                txn.put(key, VALUE.pack(version, number) * 12)

    def read(self, pause: float) -> int:
        """Values that are not what they must be in one snapshot."""

        def look(txn: LmdbTransaction) -> int:
            wrong = 0
            for number, key in enumerate(KEYS):
                if number % 25 == 0:
                    time.sleep(pause)
                wrong += txn.get(key) != VALUE.pack(txn.id(), number) * 12
            return wrong

        return self.readers.read(self.env, look)

    def close(self) -> None:
        self.lock.close()
        self.readers.close()
        index.release(self.environment)


def main() -> None:
    role, folder, guard = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if guard == "off":
        Readers.forbid = lambda self, number: False  # type: ignore[method-assign]
    mine = Index(folder)
    print("ready", flush=True)
    os.read(0, 1)
    counts = {"turns": 0, "wrong": 0}
    while counts["turns"] < TURNS or not select.select([0], [], [], 0)[0]:
        if role == "write":
            mine.write()
        else:
            counts["wrong"] += mine.read(0.0005 if counts["turns"] % 2 else 0)
        counts["turns"] += 1
    mine.close()
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
