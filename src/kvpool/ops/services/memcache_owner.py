"""``python -m kvpool.ops.services.memcache_owner CONF READY``: gives memory to a MemCache pool until told to end.

It opens the pool as CONF (mmc-local.conf) says, then makes the file READY. SIGTERM or SIGINT ends it."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from kvpool.options.configfile import read_text
from kvpool.options.memcache_conf import read_local_conf
from kvpool.stores.context import StoreContext
from kvpool.stores.memcache import MemcacheStore


def main(conf: str, ready: str) -> int:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        options = read_local_conf(read_text(conf, "mmc-local.conf"), conf).options
        store = MemcacheStore(options, StoreContext(role="owner"), conf)
        store.open()
    except (OSError, ValueError) as error:
        print(f"memcache: {error}", file=sys.stderr)
        return 1
    Path(ready).touch()
    while not ended.wait(3600):
        pass
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
