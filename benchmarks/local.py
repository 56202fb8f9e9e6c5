"""The embedded store against memmove, its lookups, what a checksum costs, and the disk tier against the bare disk."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import disk
from benchmarks.machine import Memcpy, move
from benchmarks.report import Report, median
from benchmarks.settings import Settings
from kvpool.devices import CpuCopyEngine
from kvpool.stores.base import Batch, Hit, Status
from kvpool.stores.local import LocalStore

FIGURES = r"local_(put|get)_(one_thread_)?(vs|gbps)_.*|(exists|lease|checksum|memcpy_gbps|disk)_.*"
SEGMENT, TURNS, WARM = 64 << 10, 11, 12


def run(report: Report, settings: Settings) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    pool, group = (256 << 20, 32 << 20) if settings.quick else (1 << 30, 128 << 20)
    try:
        ratios = {size: Copies(folder, size << 20, group, pool).measure() for size in (2, 8)}
        alone = {size: Copies(folder, size << 20, group, pool, CpuCopyEngine(alone=True)).measure() for size in (2, 8)}
        for call in ("put", "get"):
            for size, measured in alone.items():
                report.add(f"local_{call}_one_thread_vs_memcpy_{size}mib", measured[call])
            for size, measured in ratios.items():
                report.add(f"local_{call}_vs_memcpy_{size}mib", measured[call])
                report.add(f"local_{call}_gbps_{size}mib", measured[f"{call}_gbps"])
            report.add(f"local_{call}_vs_memcpy", min(measured[call] for measured in ratios.values()))
        for entries in (5_000,) if settings.quick else (50_000, 500_000):
            suffix = "" if entries == 50_000 else f"_{entries}"
            for call, seconds in lookups(folder, entries).items():
                report.add(f"{call}_1000_ms{suffix}", seconds * 1e3)
    finally:
        shutil.rmtree(folder)
    checksum(report, group)
    disk.run(report, settings)


def key(group: int, number: int) -> bytes:
    """Keys of one chain in the order of the chain: neighbours have nothing in common, as block hashes have not."""
    return b"v1:0123456789abcdef:g0:h0-7_l0-31_c0_0:" + hashlib.sha256(b"%d/%d" % (group, number)).hexdigest().encode()


class Copies:
    """put and get of one group of objects in scattered segments, each beside memmove of the same segments the same way.

    The pool is full and evicts. memmove writes over slots of the oldest group that is left, which are as cold as those that a put
    gets; the bytes are the same in all groups, so nothing changes there.
    """

    def __init__(
        self, root: Path, object_nbytes: int, group_nbytes: int, pool_nbytes: int, engine: CpuCopyEngine | None = None
    ) -> None:
        self._store = LocalStore(root, f"copies-{object_nbytes}", pool_nbytes, "remove", engine)
        self._count, self._nbytes, self._object = group_nbytes // object_nbytes, group_nbytes, object_nbytes
        self._groups = pool_nbytes // group_nbytes
        self._memory = np.random.default_rng(1).integers(0, 256, group_nbytes, dtype=np.uint8)
        places = np.random.default_rng(2).permutation(group_nbytes // SEGMENT).reshape(self._count, -1) * SEGMENT
        self._addresses = self._memory.ctypes.data + places
        self._sizes = np.full(object_nbytes // SEGMENT, SEGMENT, dtype=np.int64)

    def measure(self) -> dict[str, float]:
        """`put`, `get`: seconds of memmove over those of the call, median; `put_gbps`, `get_gbps`."""
        ratios: dict[str, list[float]] = {"put": [], "get": []}
        speeds: dict[str, list[float]] = {"put": [], "get": []}
        self._store.open()
        try:
            for turn in range(WARM + TURNS):
                took = {"put": self._timed(self._store.put, turn), "get": self._timed(self._store.get, max(0, turn - 2))}
                if turn < WARM:
                    continue
                plain = {"put": self._plain(turn - self._groups + 3, inward=True), "get": self._plain(turn - 3, inward=False)}
                for call, seconds in took.items():
                    ratios[call].append(plain[call] / seconds)
                    speeds[call].append(self._nbytes / seconds / 1e9)
        finally:
            self._store.close()
        return {call: median(found) for call, found in ratios.items()} | {f"{c}_gbps": median(f) for c, f in speeds.items()}

    def _batch(self, group: int) -> Batch:
        return Batch([key(group, number) for number in range(self._count)], self._addresses, self._sizes)

    def _timed(self, call: Callable[[Batch, float], object], group: int) -> float:
        batch = self._batch(group)
        began = time.perf_counter()
        results = call(batch, 30.0).results()  # type: ignore[attr-defined]
        seconds = time.perf_counter() - began
        if {result.status for result in results} != {Status.OK}:
            raise RuntimeError(f"the store did not do all of it: {results[0]}")
        return seconds

    def _plain(self, group: int, inward: bool) -> float:
        pins = self._store.pin(self._batch(group).keys)
        if not all(pins.addresses):
            raise RuntimeError(f"group {group} is no longer in the pool")
        slots = (np.array(pins.addresses)[:, None] + np.arange(0, self._object, SEGMENT)).ravel().tolist()
        segments = self._addresses.ravel().tolist()
        seconds = move(slots, segments, SEGMENT) if inward else move(segments, slots, SEGMENT)
        self._store.unpin(pins)
        return seconds


def lookups(root: Path, entries: int) -> dict[str, float]:
    """Seconds for 1,000 keys in an index of so many entries, medians: `exists`, `lease` with release, and `exists_first`, before
    this process has mapped the part of the index where the keys lie."""
    store = LocalStore(root, f"lookups-{entries}", entries * 4096 * 5 // 4, "keep")
    store.open()
    try:
        memory, keys = np.zeros(4096, dtype=np.uint8), [key(0, number) for number in range(entries)]
        for start in range(0, entries, 1000):
            results = store.put(Batch(keys[start : start + 1000], np.full((1000, 1), memory.ctypes.data), np.array([4096])), 30.0)
            if not all(result.stored for result in results.results()):
                raise RuntimeError("the pool did not take all entries")
        chains = [keys[start : start + 1000] for start in range(0, min(entries, 50_000), 1000)]
    finally:
        store.close()
    store = LocalStore(root, f"lookups-{entries}", None, "remove")
    store.open()
    try:
        return {
            "exists_first": median([_seconds(store.exists, chain) for chain in chains]),
            "exists": median([_seconds(store.exists, chain) for chain in chains]),
            "lease": median([_seconds(lambda chain: store.release(store.lease(chain, 1.0)), chain) for chain in chains]),
        }
    finally:
        store.close()


def _seconds(call: Callable[[list[bytes]], object], chain: list[bytes]) -> float:
    began = time.perf_counter()
    answers = call(chain)
    seconds = time.perf_counter() - began
    if isinstance(answers, list) and not all(isinstance(answer, Hit) for answer in answers):
        raise RuntimeError("an entry was lost")
    return seconds


def checksum(report: Report, nbytes: int) -> None:
    """xxh3_64 of 2 MiB pieces, beside memmove in the same run."""
    memcpy = Memcpy(nbytes, SEGMENT).rate(TURNS)
    report.add("memcpy_gbps_64kib", memcpy / 1e9)
    try:
        import xxhash
    except ImportError as error:
        report.missing("checksum_gbps", str(error))
        return
    data = np.random.default_rng(4).integers(0, 256, nbytes, dtype=np.uint8)
    pieces = [memoryview(data.data)[start : start + (2 << 20)] for start in range(0, nbytes, 2 << 20)]
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for piece in pieces:
            xxhash.xxh3_64_intdigest(piece)
        seconds.append(time.perf_counter() - began)
    report.add("checksum_gbps", nbytes / median(seconds) / 1e9)
    report.add("checksum_time_over_memcpy", median(seconds) * memcpy / nbytes)
