"""Loads from the disk of an owner whose staging buffer is far too small for what all its readers want at one time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from kvpool.stores.base import Hit, Tier
from tests.chaos.mooncake_reader import THREADS
from tests.stores.mooncake_pool import MIB, QUICK, key, mooncake_pool, put
from tests.stores.needs import needs_mooncake
from tests.waiting import eventually

SMALL_BUFFER = {
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(8 * MIB),
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(4 * MIB),
    "KVPOOL_MOONCAKE_CLIENT_TTL": str(QUICK.client_ttl_s),
}
READERS, OBJECTS = 2, 18


def on_disk(store, names):
    answers = store.exists([key(name) for name in names])
    return [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, Hit) and answer.tier is Tier.DISK]


def test_two_processes_read_more_than_the_staging_buffer_of_the_owner(tmp_path, ssd):
    """The owner's buffer is not the readers' to know: what does not fit is asked for again until it does."""
    needs_mooncake()
    with mooncake_pool(tmp_path / "service", dram=32 * MIB, ssd=ssd, env=SMALL_BUFFER) as pool:
        store = pool.open()
        names = [f"staged-{i}" for i in range(64)]
        for first in range(0, len(names), 8):
            put(store, names[first : first + 8], deadline_s=20.0)
            time.sleep(0.5)
        eventually(lambda: len(on_disk(store, names)) >= OBJECTS, "enough objects are on the disk only", 60)
        wanted = on_disk(store, names)[:OBJECTS]
        command = [sys.executable, "-m", "tests.chaos.mooncake_reader", pool.started.env["MOONCAKE_CONFIG_PATH"]]
        command += [str(time.time() + 6.0), *wanted]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(READERS)]
        told = [reader.communicate(timeout=240) for reader in readers]
        for out, err in told:
            assert out, err[-2000:]
            counts = json.loads(out.splitlines()[-1])
            assert counts == {"whole": {"ok": THREADS * OBJECTS}, "pieces": {"ok": THREADS * 2}}
