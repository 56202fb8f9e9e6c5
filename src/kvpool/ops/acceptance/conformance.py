"""The store against its contract: the suite of `kvpool store conformance`, in a process of its own, so that it can be ended."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import kvpool
from kvpool.ops.acceptance.book import Book, NotRun, Task, Wrong
from kvpool.ops.services import service
from kvpool.ops.services.processes import alive, last_line, spawn, stop_all

PART = "conformance"
DRAM = 64 << 20  # small enough for the checks that fill the pool
SUITE_S, START_S, STOP_S = 240.0, 90.0, 20.0
_SUITE = "import sys; from kvpool.cli import app; sys.argv[:1] = ['kvpool']; app()"


def run(book: Book, backend: str, folder: Path) -> None:
    """Every check of the suite is one of the book; where the suite does not run, that is one too."""
    if not book.wants(PART):
        book.run(PART, [Task("the suite", lambda: "")])
        return
    found: list[dict[str, object]] = []
    book.run(PART, [Task("the suite", lambda: _suite(book, backend, folder, found), seconds=20)])
    for outcome in found:
        name, text = re.sub(r"^(bc_\d+_)+", "", str(outcome["check"])).replace("_", " "), str(outcome["text"])
        if outcome["skipped"]:
            book.skip(PART, name, text, needed=False)
        else:
            book.run(PART, [Task(name, lambda passed=outcome["passed"], text=text: _told(bool(passed), text), seconds=0)])  # type: ignore[misc]


def _told(passed: bool, text: str) -> str:
    if not passed:
        raise Wrong(text)
    return text


def _suite(book: Book, backend: str, folder: Path, found: list[dict[str, object]]) -> str:
    with ExitStack() as stack:
        env: Mapping[str, str] = {}
        if backend != "local":
            place, made = folder / "conformance-service", service(backend, dram_bytes=DRAM)
            try:
                env = made.start(place, book.left(START_S)).env
            except (OSError, ImportError) as error:
                raise NotRun(f"the service does not run here: {error}") from None
            stack.callback(made.stop, place, STOP_S)
        source = str(Path(kvpool.__file__).resolve().parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", _SUITE, "store", "conformance", backend, "--json"]
        suite = spawn("conformance", command, folder, {**os.environ, **env, "PYTHONPATH": path})
        stack.callback(stop_all, [suite], STOP_S)
        end = time.monotonic() + book.left(SUITE_S)
        while alive(suite):
            if time.monotonic() > end:
                raise Wrong("the suite did not end in time")
            time.sleep(0.1)
        lines = [line for line in Path(suite.log).read_text(errors="replace").splitlines() if line.startswith('{"passed"')]
        if not lines:
            raise Wrong(f"the suite ended without a result: {last_line(suite)}")
        result = json.loads(lines[-1])
        found += result["checks"]
    return f"{result['passed']} passed, {result['failed']} failed"
