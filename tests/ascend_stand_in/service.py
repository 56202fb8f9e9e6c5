"""``python -m tests.ascend_stand_in.service start FOLDER DRAM_MB HOST | stop FOLDER``: MemCache's service, from inside a Stage."""

from __future__ import annotations

import sys
from pathlib import Path

from kvpool.ops.services.base import LOOPBACK
from kvpool.ops.services.memcache import MemcacheService

START_S, STOP_S = 40.0, 5.0


def main(what: str, folder: str, dram_mb: str = "0", host: str = LOOPBACK) -> int:
    service = MemcacheService(int(dram_mb) << 20, host=host)
    if what == "stop":
        killed = service.stop(Path(folder), STOP_S)
        print("stopped", *killed)
        return 0
    try:
        started = service.start(Path(folder), START_S)
    except (OSError, ValueError) as error:
        print(error)
        return 1
    print("started", started.addresses)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
