"""`kvpool store conformance`: a store against the contract."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kvpool.options.ascend_store import BackendName
    from kvpool.stores import Store
    from kvpool.stores.conformance import Outcome

MakeStore = Callable[[], "Store"]


def conformance(
    backend: Annotated[str, typer.Argument(metavar="local|mooncake|memcache|yuanrong", help="Which store to test.")] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Test a store against the contract. Exit status 1 when a check fails.

    `local` is tested in a pool of its own that is removed afterwards. The others are live: the store that the environment names (as
    for an engine), else the one that `kvpool store start` made. Each check uses a namespace of its own; what would fill a large
    pool is skipped."""
    from kvpool.stores.conformance import run_conformance

    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if not as_json:
            state = "ok" if outcome.passed else "skipped" if outcome.skipped else "FAILED"
            typer.echo(f"{state:8}{outcome.check}{': ' if outcome.text else ''}{outcome.text}")

    try:
        with _local() if backend == "local" else _live(backend) as make_store:
            passed, failed = run_conformance(make_store, report)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({"passed": passed, "failed": failed, "checks": [outcome._asdict() for outcome in outcomes]}))
    else:
        typer.echo(f"{passed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


@contextmanager
def _local() -> Iterator[MakeStore]:
    from kvpool.stores import build_store
    from kvpool.stores.conformance import MIN_CAPACITY

    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="kvpool-conformance-", dir=shared if os.access(shared, os.W_OK) else None))

    def make_store() -> Store:
        return build_store("local", root=root, name="conformance", dram_bytes=MIN_CAPACITY)

    try:
        first = make_store()
        first.open()  # what keeps it from opening is one error, not one per check
        first.close()
        yield make_store
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _live(backend: str) -> Iterator[MakeStore]:
    """A store that is there. Opened once before the checks: what keeps it from opening is one error, not one per check."""
    from kvpool.ops.services import default_folder
    from kvpool.ops.services.processes import load
    from kvpool.options import Deployment
    from kvpool.options.backend import CONFIG_VARIABLE
    from kvpool.options.backend_file import read_backend_file
    from kvpool.stores import BACKENDS, build_store
    from kvpool.stores.context import StoreContext

    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown (accepted: {', '.join(BACKENDS)})")
    name = cast("BackendName", backend)
    variable = CONFIG_VARIABLE[name]
    if not os.environ.get(variable):
        started = load(default_folder(backend))
        if started is None:
            raise ValueError(f"{variable} is not set, and no service was started: set it, or run `kvpool store start {backend}`")
        os.environ.update(started.env)
    file = read_backend_file(name, os.environ, Deployment(device="cpu"))
    assert file is not None, "every store but local has a configuration"
    context = StoreContext("worker" if backend == "memcache" else "tool")  # a tool of MemCache cannot put

    def make_store() -> Store:
        return build_store(backend, config=file.options, conf_path=file.path, context=context)

    first = make_store()
    first.open()
    try:
        yield make_store
    finally:
        first.close()
