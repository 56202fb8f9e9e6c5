"""Like demo.py, with a disk tier and a reboot in between: an engine answers, the pool's memory is deleted as a reboot would, and an
engine started afterwards finds the document on the disk.

The last line is for scripts: `RESULT identical=true cold_s=... disk_hit_s=... disk_blocks=...` (seconds to the first token); the
exit code is 1 if the answers differ or the disk was not used.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo import end_when_told, require_model, run_engine, show

from kvpool.stores import DiskSettings, make_local_store
from kvpool.stores.base import Store, TierStats

POOL = "demo-ssd"
DRAM_BYTES = 1 << 30
SSD_BYTES = 2 << 30
COPIED_S = 60


def connector(memory: Path, ssd: Path) -> dict[str, Any]:
    """Watermarks of 0: everything is copied to the disk at once."""
    extra = {
        "backend": "local",
        "local_pool_name": POOL,
        "local_pool_root": str(memory),
        "local_dram_size": DRAM_BYTES,
        "enable_ssd_offload": True,
        "ssd_offload_path": str(ssd),
        "local_ssd_size": SSD_BYTES,
        "local_dram_high_watermark": 0,
        "local_dram_low_watermark": 0,
    }
    return {"kv_connector": "AscendStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def open_pool(memory: Path, ssd: Path) -> Store:
    settings = DiskSettings(str(ssd), SSD_BYTES, dram_high=0, dram_low=0)
    store = make_local_store(memory, POOL, DRAM_BYTES, disk=settings)
    store.open()
    return store


def finish_copying(memory: Path, ssd: Path) -> TierStats:
    """Wait until the disk has all that the memory has; what it holds then."""
    store = open_pool(memory, ssd)
    try:
        store.reserve(0, 1, 1.0)  # a process that only looks copies nothing
        end = time.monotonic() + COPIED_S
        while True:
            dram, disk = store.stats().tiers
            if disk.objects >= dram.objects or time.monotonic() >= end:
                return disk
            time.sleep(0.2)
    finally:
        store.close()


def main() -> int:
    require_model()
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch, contextlib.ExitStack() as cleaned:
        memory = Path(tempfile.mkdtemp(prefix="kvpool-demo-ssd-", dir=shared))
        cleaned.callback(shutil.rmtree, memory, ignore_errors=True)
        ssd = Path(scratch).resolve() / "ssd"
        ssd.mkdir()
        first = run_engine(Path(scratch), "A", 1, connector(memory, ssd))
        disk = finish_copying(memory, ssd)
        print(
            f"demo: the disk has {disk.objects} blocks, {disk.used_bytes >> 20} MiB; the memory of the pool is deleted", flush=True
        )
        shutil.rmtree(memory / POOL)
        second = run_engine(Path(scratch), "B", 1, connector(memory, ssd))
    (cold,), (disk_hit,) = first["asks"], second["asks"]
    identical = show(first["prompt_tokens"], {"cold": cold, "disk hit, memory wiped": disk_hit})
    was_cold, from_disk = cold["cached_tokens"] == 0, disk_hit["pool_tokens"] > 0
    if not from_disk:
        print("demo: the second engine did not load the document from the disk", file=sys.stderr)
    seconds = f"cold_s={cold['ttft_s']:.3f} disk_hit_s={disk_hit['ttft_s']:.3f} disk_blocks={disk.objects}"
    print(f"RESULT identical={str(identical).lower()} {seconds}", flush=True)
    return 0 if identical and was_cold and from_disk else 1


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
