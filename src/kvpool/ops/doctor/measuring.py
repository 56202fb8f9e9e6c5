"""Measures a store in a process of its own: a library that hangs or crashes takes nothing down, and ends at its deadline."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.ops.doctor.host import Ran, run_tool
from kvpool.ops.doctor.need import Need

MARK = "KVPOOL_MEASURED "
LOCAL_S, SERVICE_S = 30.0, 150.0


@dataclass(frozen=True, slots=True)
class Measured:
    """GB/s (10^9 bytes), the best of a few rounds. ``lease_s`` is what a service grants, None where it was not known in time."""

    put_gbps: float = 0.0
    get_gbps: float = 0.0
    same: bool = True
    lease_s: float | None = None
    error: str = ""


def measure(need: Need) -> Measured:
    """Put, get and compare 64 MB. A local store is measured in a pool of its own, which is removed; others in their real pool."""
    request: dict[str, Any] = {"backend": need.backend, "device": need.device, "env": {}}
    if need.conf_variable and need.conf_path:
        request["env"] = {need.conf_variable: need.conf_path}  # all others are inherited
    if need.backend != "local":
        return read_answer(_run(request, SERVICE_S), SERVICE_S)
    above = need.options.local_pool_root if need.options is not None else None
    place = Path(above or "/dev/shm")
    try:
        folder = tempfile.mkdtemp(prefix="kvpool-doctor-", dir=place if place.is_dir() else None)
    except OSError as error:
        return Measured(error=f"no pool can be made in {place}: {error.strerror}")
    try:
        return read_answer(_run(request | {"root": folder}, LOCAL_S), LOCAL_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(request: dict[str, Any], seconds: float) -> Ran | None:
    return run_tool([sys.executable, "-m", "kvpool.ops.doctor.measured", json.dumps(request)], seconds)


def read_answer(ran: Ran | None, seconds: float) -> Measured:
    """What the process printed before it ended; its last line where that is not an answer."""
    if ran is None:
        return Measured(error="this Python cannot start itself")
    lines = ran.output.strip().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, TypeError):
            if line.startswith(MARK):
                return Measured(**json.loads(line.removeprefix(MARK)))
    if ran.code is None:
        return Measured(error=f"no answer within {seconds:g} s")
    return Measured(error=f"the measuring process ended with {ran.code}: {(lines or ['no output'])[-1][:200]}")
