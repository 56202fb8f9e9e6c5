"""A process that gives memory to a Mooncake pool and does nothing else.

``python -m kvpool.ops.services.mooncake_owner OPTIONS READY [NUMBER]``: OPTIONS is a mooncake.json. The file READY appears, with
the pid in it, when the memory is in the pool and mapped, and goes when the process ends. NUMBER (0) tells owners that share an
ssd_offload_path apart: each uses the folder owner_NUMBER. What engines store here outlives them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from kvpool.options.deployment import UNKNOWN
from kvpool.options.mooncake_json import read_mooncake
from kvpool.stores.context import StoreContext
from kvpool.stores.mooncake import MooncakeStore

_LOOK_S = 5.0


def main(options: str, ready: str, number: str = "0") -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log, stop = logging.getLogger("kvpool"), threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: stop.set())
    reading = read_mooncake(Path(options).read_text(), options, os.environ, UNKNOWN)
    for line in reading.warnings:
        log.warning("kvpool: %s", line)
    store = MooncakeStore(reading.options, StoreContext(role="owner", rank=int(number)))
    store.open()
    store.wait_mapped(float("inf") if reading.options.global_segment_size else 0.0, stop)
    mark = Path(ready)
    mark.write_text(str(os.getpid()))
    well = True
    while not stop.wait(_LOOK_S):
        health = store.health()
        if health.ok != well:
            well = health.ok
            log.warning("kvpool: %s", "the master answers again" if well else health.text)
    mark.unlink(missing_ok=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
