"""What the chaos tests of the disk tier run in processes of their own. Usage: disk_worker.py ROOT SSD SEED; as store_worker."""

from __future__ import annotations

import sys
from pathlib import Path

from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local import LocalStore
from tests.chaos import store_worker as sw

DRAM = 12 << 20
DISK = 48 << 20


def settings(ssd: str, nbytes: int = DISK, **others: object) -> DiskSettings:
    """Copies early: at most a tenth of the memory, four of the largest objects, is ever left uncopied."""
    return DiskSettings(ssd, nbytes, **{"dram_high": 10, "dram_low": 5, **others})  # type: ignore[arg-type]


def open_store(root: str, ssd: str, dram: int = DRAM, **others: object) -> LocalStore:
    store = LocalStore(Path(root), "chaos", dram, disk=settings(ssd, **others))
    store.open()
    return store


def main() -> None:
    root, ssd, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = open_store(root, ssd)
    worker = sw.Worker(store, seed)
    print("ready", flush=True)
    worker.work(("hit", "put"))


if __name__ == "__main__":
    main()
