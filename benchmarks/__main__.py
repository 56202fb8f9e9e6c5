"""python -m benchmarks [PART ...] [--quick] [--results DIR] [--traces DIR] [--disk DIR]

Without a part: all of them. `--quick` runs every part in its smallest form, to see that it works; its figures mean nothing and go
to a folder of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from benchmarks import local, machine, peers, plot, proxy, stores, trace, ttft, zero_hit
from benchmarks.report import Report
from benchmarks.settings import Settings, cache_folder

PARTS = {"local": local, "stores": stores, "ttft": ttft, "zero-hit": zero_hit, "peers": peers, "trace": trace, "proxy": proxy}
RESULTS = Path(__file__).with_name("results")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[2] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="smallest form; the figures mean nothing")
    parser.add_argument("--results", type=Path, help="folder for latest.json, table.md and figures.png")
    traces = os.environ.get("KVPOOL_TRACES")
    parser.add_argument("--traces", type=Path, default=Path(traces) if traces else None, help="folder with the public traces")
    parser.add_argument("--disk", type=Path, default=cache_folder() / "disk", help="folder on the disk to measure")
    parsed = parser.parse_args(given)
    if unknown := sorted(set(parsed.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r} (accepted: {', '.join(PARTS)})")
    return parsed


def end(_number: int, _frame: FrameType | None) -> None:
    """A run that is told to end leaves through its `finally`s, which stop what it started."""
    raise SystemExit(143)


def main() -> int:
    signal.signal(signal.SIGTERM, end)
    given = arguments()
    settings = Settings(quick=given.quick, traces=given.traces, disk=given.disk)
    report = Report(given.results or (RESULTS / "quick" if given.quick else RESULTS))
    report.load()
    began = time.monotonic()
    for name in given.parts or PARTS:
        part, start = PARTS[name], time.monotonic()
        report.forget(part.FIGURES)
        with report.part(name):
            part.run(report, settings)
        prefix = name.replace("-", "_")
        report.add(f"{prefix}_seconds", round(time.monotonic() - start, 1))
        report.add(f"{prefix}_date", machine.today())
        report.add(f"{prefix}_commit", machine.commit())
        report.figures.update(machine.describe(), quick=given.quick, date=machine.today(), commit=machine.commit())
        report.write(None)
    report.write(plot.draw)
    print(f"bench: {report.folder}: {time.monotonic() - began:.0f} s; failed: {', '.join(report.failed) or 'none'}", flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
