"""A Mooncake client that gives memory to the pool and does nothing else: python segment_owner.py MASTER NBYTES

It says `ready` and stays until it is ended: what engines store outlives them here.
"""

from __future__ import annotations

import signal
import sys


def main(master: str, nbytes: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", nbytes, 16 << 20, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup: {code}")
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
