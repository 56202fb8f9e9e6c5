"""The disk: what O_DIRECT alone does, and what the store's disk tier makes of it."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import disk_tier
from benchmarks.report import Report, median
from benchmarks.settings import Settings

PIECE, THREADS, TURNS = 2 << 20, 2, 5


def run(report: Report, settings: Settings) -> None:
    nbytes = (64 if settings.quick else 512) << 20
    settings.disk.mkdir(parents=True, exist_ok=True)
    try:
        written, read = raw(settings.disk, nbytes)
    except OSError as error:
        for name in ("disk_raw_write_gbps", "disk_raw_read_gbps"):
            report.missing(name, f"O_DIRECT in {settings.disk}: {error}")
        return
    report.add("disk_raw_write_gbps", written / 1e9)
    report.add("disk_raw_read_gbps", read / 1e9)
    tier(report, settings, written, read)


def tier(report: Report, settings: Settings, raw_written: float, raw_read: float) -> None:
    """The disk tier as a share of the bare disk."""
    try:
        written, read = disk_tier.measure(settings.disk, (64 if settings.quick else 256) << 20)
    except (disk_tier.NoDiskTier, RuntimeError, OSError, ValueError) as error:
        for name in ("disk_tier_write_vs_raw", "disk_tier_read_vs_raw"):
            report.missing(name, str(error))
        return
    report.add("disk_tier_write_gbps", written / 1e9)
    report.add("disk_tier_read_gbps", read / 1e9)
    report.add("disk_tier_write_vs_raw", written / raw_written)
    report.add("disk_tier_read_vs_raw", read / raw_read)


def raw(folder: Path, nbytes: int) -> tuple[float, float]:
    """Bytes a second written and read, medians: pieces of 2 MiB, two threads, one preallocated file."""
    path = Path(tempfile.mkstemp(prefix="raw-", dir=folder)[1])
    buffers = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(fd, 0, nbytes)
        for buffer in buffers:
            buffer.write(os.urandom(PIECE))
        written = [_pass(nbytes, buffers, lambda buffer, place: os.pwritev(fd, [buffer], place)) for _ in range(TURNS)]
        os.fsync(fd)
        read = [_pass(nbytes, buffers, lambda buffer, place: os.preadv(fd, [buffer], place)) for _ in range(TURNS)]
    finally:
        if fd >= 0:
            os.close(fd)
        path.unlink()
    return nbytes / median(written), nbytes / median(read)


def _pass(nbytes: int, buffers: list[mmap.mmap], call: Callable[[mmap.mmap, int], int]) -> float:
    """One pass over the file, every thread with a buffer and a share of its own. Seconds."""

    def share(number: int) -> None:
        for place in range(number * PIECE, nbytes, THREADS * PIECE):
            if call(buffers[number], place) != PIECE:
                raise OSError("a short transfer")

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(share, range(THREADS)))
    return time.perf_counter() - began
