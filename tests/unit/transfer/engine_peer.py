"""The other process of test_transfer_engines: `engine_peer.py ENGINE ROOT`. Holds known bytes until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvpool.stores.base import Batch
from kvpool.transfer import EngineSettings, build_engine
from kvpool.transfer.base import StagedEngine


def main(name: str, root: str) -> None:
    memory = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
    base = memory.ctypes.data
    engine = build_engine(name, EngineSettings("127.0.0.1", True, root=Path(root), buffer_bytes=8 << 20))
    engine.open([(base, memory.nbytes)])
    if isinstance(engine, StagedEngine):
        engine.publish("a", Batch([b"k0", b"k1"], base + np.array([[0], [1000]]), np.array([1000])), 5.0)
    print(f"peer {base} {engine.address().hex()}", flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
