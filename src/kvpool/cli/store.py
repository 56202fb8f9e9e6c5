"""`kvpool store …`"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.service import tell_use

if TYPE_CHECKING:
    from kvpool.stores.local import LocalStore

app = typer.Typer(no_args_is_help=True, help="Look into pools and test stores.")

Name = Annotated[str, typer.Argument(help="The pool's name.")]
Root = Annotated[Path | None, typer.Option(help="The folder the pool lies in (default: the user's folder in /dev/shm).")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@contextmanager
def _joined(root: Path | None, name: str) -> Iterator[LocalStore]:
    """The pool as it is, live or not; exit status 2 and the reason when it cannot be opened."""
    from kvpool.stores.local import LocalStore

    store = LocalStore(root, name)
    try:
        store.open()
    except (OSError, ValueError) as error:
        typer.echo(str(error.strerror if isinstance(error, OSError) and error.strerror else error), err=True)
        raise typer.Exit(2) from None
    try:
        yield store
    finally:
        store.close()


def _table(title: str, rows: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console().print(table)


@app.command()
def stat(
    name: Annotated[str | None, typer.Argument(help="The pool's name (default: default).")] = None,
    root: Root = None,
    service: Annotated[
        str | None,
        typer.Option(metavar="mooncake", help="Ask the service that `kvpool store start` made, not a local pool."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="With --service: its folder (default: the user's state folder).")] = None,
    as_json: Json = False,
) -> None:
    """Show how full a pool and its disk tier are, how many use it, and with --service what each strict tenant may have and has."""
    if service is not None and (name is not None or root is not None):
        typer.echo("error: NAME and --root are of a local pool, not of --service", err=True)
        raise typer.Exit(2)
    if service is None and folder is not None:
        typer.echo("error: --folder is of --service", err=True)
        raise typer.Exit(2)
    if service is not None:
        tell_use(service, folder, as_json=as_json)
        return
    name = name or "default"
    with _joined(root, name) as store:
        numbers = dataclasses.asdict(store.stats())
        numbers["users"] = store.users() - 1  # without us; an engine counts once per rank and once for its scheduler
        health = store.health()
    numbers["health"] = "ok" if health.ok else health.text
    numbers["tiers"] = [{**tier, "tier": tier["tier"].value} for tier in numbers["tiers"]]
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    for tier in numbers.pop("tiers")[1:]:
        numbers |= {f"{tier['tier']} {field}": value for field, value in tier.items() if field != "tier"}
    for field, value in numbers.items():
        if field.endswith("_bytes"):
            numbers[field] = f"{value:,} ({value / (1 << 30):.2f} GiB)"
    _table(f"pool {name}", numbers)


@app.command()
def verify(name: Name = "default", root: Root = None, as_json: Json = False) -> None:
    """Check that every slot of a pool and of its disk tier is accounted for exactly once, and that the records on the disk agree.

    Exit status 1 when something is wrong."""
    with _joined(root, name) as store:
        findings = store.verify()
    if as_json:
        typer.echo(json.dumps({"findings": findings}))
    else:
        for finding in findings:
            typer.echo(finding)
        typer.echo(f"{len(findings)} findings")
    if findings:
        raise typer.Exit(1)


@app.command()
def rm(
    name: Name = "default",
    root: Root = None,
    prefix: Annotated[str | None, typer.Option(help="Remove the objects whose keys start so.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all objects.")] = False,
    as_json: Json = False,
) -> None:
    """Remove objects from a pool, also while engines use it: what they read at that moment stays readable to them."""
    if (prefix is None) == (not everything) or prefix == "":
        typer.echo("give either --prefix with a text, or --all", err=True)
        raise typer.Exit(2)
    with _joined(root, name) as store:
        removed = store.clear(b"" if prefix is None else prefix.encode())
    typer.echo(json.dumps({"removed": removed}) if as_json else f"{removed} objects removed")
