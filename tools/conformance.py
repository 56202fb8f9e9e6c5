"""python -m tools.conformance STORE: start the store's service, run ``kvpool store conformance STORE``, stop the service.

The exit status is that of the suite; 2 where the service cannot run on this machine, 124 where the suite takes too long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.live_services import live_service

ROOT = Path(__file__).resolve().parents[1]
STORES = ("local", "mooncake", "memcache", "yuanrong")
DRAM = 64 << 20  # small enough for the checks that fill the pool
START_S, SUITE_S, STOP_S = 90.0, 900.0, 30.0
_SUITE = "import sys; from kvpool.cli import app; sys.argv[:1] = ['kvpool']; app()"


def suite(backend: str, env: dict[str, str], prefix: list[str]) -> int:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*prefix, sys.executable, "-c", _SUITE, "store", "conformance", backend]
    try:
        return subprocess.run(command, env={**os.environ, **env, "PYTHONPATH": path}, check=False, timeout=SUITE_S).returncode
    except subprocess.TimeoutExpired:
        print(f"conformance: {backend} took more than {SUITE_S:g} s", file=sys.stderr)
        return 124


def end(_number: int, _frame: FrameType | None) -> None:
    """A run that is told to end stops the service first."""
    raise SystemExit(143)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in STORES:
        print(f"usage: make conformance STORE={'|'.join(STORES)}", file=sys.stderr)
        return 2
    backend = arguments[0]
    signal.signal(signal.SIGTERM, end)
    if backend == "local":
        return suite(backend, {}, [])
    with tempfile.TemporaryDirectory(prefix="kvpool-conformance-") as folder:
        try:
            with live_service(backend, Path(folder, "service"), DRAM, START_S, STOP_S) as live:
                return suite(backend, live.started.env, live.prefix)
        except (OSError, ValueError, ImportError) as error:
            print(f"conformance: {backend} does not run here: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
