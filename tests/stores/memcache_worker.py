"""A process with a MemCache store, which does what it is told: one JSON line in, one JSON line out. Usage: memcache_worker FOLDER.

With a second argument ``conformance`` it runs the suite instead and prints one JSON line per check."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.options.memcache_conf import read_local_conf
from kvpool.stores.base import Batch, Hit, Writer
from kvpool.stores.conformance import Outcome, run_conformance
from kvpool.stores.context import Role, StoreContext
from kvpool.stores.memcache import MemcacheStore


def make_store(folder: Path, role: Role = "worker", connect_s: float = 20.0) -> MemcacheStore:
    conf = folder / "mmc-local.conf"
    options = read_local_conf(conf.read_text(), str(conf)).options
    os.environ["MMC_META_CONFIG_PATH"] = str(folder / "mmc-meta.conf")
    return MemcacheStore(options, StoreContext(role=role), str(conf), connect_s=connect_s)


def content(key: str, nbytes: int) -> np.ndarray:
    """Bytes that tell the key and the place."""
    seed = np.uint64(int.from_bytes(key.encode()[-8:].rjust(8), "little"))
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
    return words.view(np.uint8)[:nbytes]


def batch(keys: list[str], memory: np.ndarray, segments: int = 4) -> Batch:
    """Each object in ``segments`` pieces, the last of which takes the rest."""
    nbytes = memory.shape[1]
    starts = np.arange(segments, dtype=np.int64) * (nbytes // segments)
    sizes = np.diff(np.append(starts, nbytes))
    rows = memory.ctypes.data + np.arange(len(keys), dtype=np.int64) * memory.strides[0]
    return Batch([key.encode() for key in keys], rows[:, None] + starts, sizes)


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = make_store(folder)
        self.writer: Writer | None = None
        self.kept: list[object] = []  # memory of calls that were given up

    def open(self, role: Role = "worker", connect_s: float = 20.0, patience_s: float | None = None) -> str:
        self.store = make_store(self.folder, role, connect_s)
        if patience_s is not None:
            self.store._half_written.patience_s = patience_s
        try:
            self.store.open()
        except OSError as error:
            return str(error)
        return "open"

    def close(self) -> str:
        self.store.close()
        return "closed"

    def put(self, keys: list[str], nbytes: int = 4096, wait_s: float = 20.0) -> list[str]:
        memory = np.stack([content(key, nbytes) for key in keys])
        handle = self.store.put(batch(keys, memory), wait_s)
        if not handle.wait(wait_s):
            self.kept += [handle, memory]
            return ["overdue"]
        print({(result.status.value, result.code, result.text) for result in handle.results()})  # shown where a test fails
        return [result.status.value for result in handle.results()]

    def get(self, keys: list[str], nbytes: int = 4096, wait_s: float = 20.0) -> list[str]:
        memory = np.zeros((len(keys), nbytes), dtype=np.uint8)
        handle = self.store.get(batch(keys, memory, 3), wait_s)
        if not handle.wait(wait_s):
            self.kept += [handle, memory]
            return ["overdue"]
        right = [bool((row == content(key, nbytes)).all()) for key, row in zip(keys, memory, strict=True)]
        outcome = zip(handle.results(), right, strict=True)
        return ["wrong bytes" if result.status.value == "ok" and not good else result.status.value for result, good in outcome]

    def exists(self, keys: list[str]) -> list[str]:
        answers = self.store.exists([key.encode() for key in keys])
        return ["hit" if isinstance(answer, Hit) else answer.value for answer in answers]

    def remove(self, keys: list[str]) -> list[str]:
        return [result.status.value for result in self.store.remove([key.encode() for key in keys])]

    def begin(self, keys: list[str], nbytes: int = 4096) -> list[str]:
        self.writer = self.store.begin_write([key.encode() for key in keys], nbytes, 60.0)
        return [result.status.value for result in self.writer.results]

    def write(self, keys: list[str], nbytes: int = 4096, part: float = 1.0) -> list[str]:
        assert self.writer is not None
        memory = np.stack([content(key, nbytes)[: int(nbytes * part)] for key in keys])
        pieces = batch(keys, memory)
        return [result.status.value for result in self.writer.write(range(len(keys)), 0, pieces.addresses, pieces.sizes)]

    def commit(self) -> list[str]:
        assert self.writer is not None
        return [result.status.value for result in self.writer.commit()]

    def end(self) -> None:
        """Leave as any program does."""
        sys.exit(0)

    def health(self) -> bool:
        return self.store.health().ok

    def stats(self) -> dict[str, int]:
        stats = self.store.stats()
        return {"capacity": stats.capacity_bytes, "used": stats.used_bytes, "objects": stats.objects}

    def list(self) -> list[str]:
        return [key.decode() for key in self.store.list()]


def say(text: str) -> None:
    """A line of its own, in one write: the library prints to the same place."""
    sys.stdout.write(f"\n> {text}\n")
    sys.stdout.flush()


def obey(worker: Worker) -> None:
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        began = time.monotonic()
        answer = getattr(worker, order.pop("do"))(**order)
        say(json.dumps({"answer": answer, "took_s": time.monotonic() - began}))


def main(folder: Path, what: str = "") -> None:
    if what == "conformance":
        keeper = make_store(folder)  # closing the process's last store takes the library seconds
        keeper.open()

        def report(outcome: Outcome) -> None:
            say(json.dumps(outcome._asdict()))

        run_conformance(lambda: make_store(folder), report)
    else:
        say("ready")
        obey(Worker(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
