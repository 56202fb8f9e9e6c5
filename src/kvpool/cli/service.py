"""`kvpool store start|stop|status`, and `stat --service`: the services of the stores on this host, for trial and test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.ops.services import BACKENDS, Service, Started, default_folder, service
from kvpool.ops.services.base import LOOPBACK
from kvpool.ops.services.ports import check_host
from kvpool.ops.services.processes import load
from kvpool.options.scalars import read_size

if TYPE_CHECKING:
    from kvpool.ops.services.mooncake_usage import PoolUse

START_S, STOP_S = 90.0, 20.0

Backend = Annotated[str, typer.Argument(metavar="|".join(BACKENDS), help="Which store.")]
Folder = Annotated[Path | None, typer.Option(help="Where its state, logs and files lie (default: the user's state folder).")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def start(
    backend: Backend,
    folder: Folder = None,
    dram: Annotated[str, typer.Option(help="Memory that the service gives to the pool.")] = "1GB",
    tenant: Annotated[list[str] | None, typer.Option(help="mooncake: strict tenants, as NAME=QUOTA; repeatable.")] = None,
    discovery: Annotated[str, typer.Option(help="yuanrong: metastore, etcd or coordinator.")] = "metastore",
    host: Annotated[str, typer.Option(help="The address on which it listens, without authentication.")] = LOOPBACK,
    timeout: Annotated[float, typer.Option(help="Seconds until it must answer.")] = START_S,
    as_json: Json = False,
) -> None:
    """Start a store's service on this host: on loopback, unless told otherwise, free ports, no disk. It outlives this command and
    the engines."""
    try:
        made = _service(backend, dram, tenant or [], discovery, host)
        started = made.start(folder or default_folder(backend), timeout)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(
            json.dumps({"folder": started.folder, "env": started.env, "addresses": started.addresses, "notes": started.notes})
        )
    else:
        _tell(started)


def _service(backend: str, dram: str, tenants: list[str], discovery: str, host: str) -> Service:
    """ValueError where an option is wrong, or is another store's."""
    check_host(host)
    try:
        nbytes = read_size(dram)
    except ValueError:
        raise ValueError(f"--dram {dram!r}: expected a size such as 1GB") from None
    return service(backend, dram_bytes=nbytes, tenants=_quotas(tenants), discovery=discovery, host=host)


def _quotas(given: list[str]) -> dict[str, str]:
    quotas: dict[str, str] = {}
    for text in given:
        name, quota = _quota(text)
        if name in quotas:
            raise ValueError(f"--tenant {text!r}: {name} has the quota {quotas[name]} already; give each tenant once")
        quotas[name] = quota
    return quotas


def _quota(text: str) -> tuple[str, str]:
    name, _, quota = text.partition("=")
    try:
        read_size(quota)
    except ValueError:
        raise ValueError(f"--tenant {text!r}: expected NAME=QUOTA, such as a=200GB") from None
    return name, quota


def _tell(started: Started) -> None:
    """What an engine's shell needs, ready to be pasted."""
    for name, value in started.env.items():
        typer.echo(f"export {name}={value}")
    for name, address in started.addresses.items():
        typer.echo(f"# {name}: {address}")
    for note in started.notes:
        typer.echo(f"# {note}")


def stop(backend: Backend, folder: Folder = None) -> None:
    """Stop a service that `start` made."""
    try:
        made, where = service(backend), folder or default_folder(backend)
        ran = [name for name, state in made.status(where).items() if state != "dead"]
        killed = made.stop(where, STOP_S)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if not ran:
        typer.echo(f"nothing to stop: no service of {backend} ran in {where}")
        return
    typer.echo(f"stopped; had to be killed: {', '.join(killed)}" if killed else "stopped")


def status(backend: Backend, folder: Folder = None, as_json: Json = False) -> None:
    """Show whether a service answers. Exit status 1 where it does not."""
    try:
        found = service(backend).status(folder or default_folder(backend))
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for name, state in found.items():
            typer.echo(f"{name}: {state}")
        if not found:
            typer.echo("not started")
    if not found or set(found.values()) != {"ready"}:
        raise typer.Exit(1)


def tell_use(backend: str, folder: Path | None, *, as_json: bool) -> None:
    """How full a service's pool is, and its tenants. Exit status 2 and the reason where that cannot be told."""
    from kvpool.ops.services.mooncake_usage import usage

    place = folder or default_folder(backend)
    try:
        if backend != "mooncake":
            raise ValueError(f"--service {backend!r}: cannot tell how full it is (accepted: mooncake)")
        started = load(place)
        if started is None or started.backend != backend:
            raise ValueError(f"{place} holds no {backend} service: start one with `kvpool store start {backend}`")
        use = usage(started.addresses["metrics"])
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        tenants = None if use.tenants is None else [tenant._asdict() for tenant in use.tenants]
        typer.echo(json.dumps({**use._asdict(), "tenants": tenants}))
        return
    _print_use(use, f"{backend}, master {started.addresses['master']}")


def _print_use(use: PoolUse, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = [("pool", use.capacity_bytes, use.capacity_bytes, use.used_bytes)]
    if use.disk_capacity_bytes or use.disk_used_bytes:
        rows.append(("disk", use.disk_capacity_bytes, use.disk_capacity_bytes, use.disk_used_bytes))
    rows += [(f"tenant {tenant.tenant}", *tenant[1:]) for tenant in use.tenants or []]
    table = Table("", "quota or capacity", "in effect", "used", title=title)
    for name, *sizes in rows:
        table.add_row(name, *(f"{nbytes:,} ({nbytes / (1 << 20):,.1f} MiB)" for nbytes in sizes))
    Console().print(table)
    if use.tenants is None:
        typer.echo("no tenants: the master is not in strict mode")
