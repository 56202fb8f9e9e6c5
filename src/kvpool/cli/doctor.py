"""`kvpool doctor`"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kvpool.ops.doctor import Finding
    from kvpool.ops.doctor.need import Link, Need, Role, Series
    from kvpool.options.ascend_store import BackendName


class RoleName(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class SeriesName(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"
    A2 = "a2"
    A3 = "a3"
    A5 = "a5"


class BackendChoice(enum.Enum):
    LOCAL = "local"
    MOONCAKE = "mooncake"
    MEMCACHE = "memcache"
    YUANRONG = "yuanrong"


class LinkName(enum.Enum):
    ROCE = "roce"
    HCCS = "hccs"
    UBOE = "uboe"
    UB = "ub"


Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="FILE|JSON",
        help="A kv-transfer-config (JSON or file), mooncake.json, mmc-local.conf, mmc-meta.conf or yuanrong.json; repeatable.",
    ),
]
Services = Annotated[
    list[str] | None,
    typer.Option("--service", metavar="COMMAND", help="A command that starts a service: mooncake_master … or dscli start …."),
]
Peers = Annotated[list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="Another host must answer there; repeatable.")]
NpuPeers = Annotated[
    list[str] | None,
    typer.Option("--npu-peer", metavar="ADDRESS", help="An NPU of another host, for hccn_tool's ping; repeatable."),
]
Ports = Annotated[
    list[int] | None,
    typer.Option("--port", min=1, max=65535, help="A further port that must be free here (the engine's, the proxy's); repeatable."),
]
COLOURS = {"ok": "green", "warning": "yellow", "failure": "red", "not checked": "cyan"}


def doctor(
    role: Annotated[RoleName | None, typer.Option(help="Unset: that of the kv-transfer-config, else mixed.")] = None,
    series: Annotated[
        SeriesName | None, typer.Option(help="What the engines run on. Unset: what this host shows.", case_sensitive=False)
    ] = None,
    backend: Annotated[
        BackendChoice | None, typer.Option(help="Unset: that of the configuration, else of the environment.")
    ] = None,
    link: Annotated[LinkName | None, typer.Option(help="Links between NPUs: roce or hccs on a3, uboe or ub on a5.")] = None,
    config: Configs = None,
    service: Services = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the engines on this host.")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="Hosts that share the pool.")] = None,
    hash_algo: Annotated[str | None, typer.Option("--hash-algo", help="The engine's --prefix-caching-hash-algo.")] = None,
    lingqu: Annotated[str | None, typer.Option(help="Version of the LingQu Computing Network (a3), which no host shows.")] = None,
    port: Ports = None,
    peer: Peers = None,
    npu_peer: NpuPeers = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Put and get 64 MB through the store, and wait for a lease of mooncake. Unset: only for local.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this host against what a deployment needs. Exit status 1 where something would fail, 2 for wrong arguments.

    Nothing is changed: fixes are printed, never run. A measurement writes to the store and removes what it wrote."""
    from kvpool.ops.doctor import Asked, Host, examine
    from kvpool.options import OptionError

    try:
        asked = Asked(
            role=cast("Role | None", _value(role)),
            series=cast("Series | None", _value(series)),
            backend=cast("BackendName | None", _value(backend)),
            link=cast("Link | None", _value(link)),
            configs=tuple(config or ()),
            commands=tuple(service or ()),
            ranks=ranks,
            hosts=hosts,
            hash_algo=hash_algo,
            lingqu=lingqu,
            ports=tuple(port or ()),
            peers=_addresses(peer or []),
            npu_peers=tuple(npu_peer or ()),
            measure=measure,
        )
        need, findings = examine(asked, Host(env=dict(os.environ)))
    except OptionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    (_print_json if as_json else _print_tables)(need, findings)
    if _count(findings, "failure"):
        raise typer.Exit(1)


def _addresses(peers: Sequence[str]) -> tuple[str, ...]:
    """OptionError for what is no host and port."""
    from kvpool.options import OptionError
    from kvpool.options.scalars import read_address

    for address in peers:
        try:
            read_address(address)
        except ValueError:
            raise OptionError("--peer", address, "expected <host>:<port>") from None
    return tuple(peers)


def _value(name: enum.Enum | None) -> str | None:
    return None if name is None else str(name.value)


def _count(findings: Sequence[Finding], level: str) -> int:
    return sum(finding.level.value == level for finding in findings)


def _print_json(need: Need, findings: Sequence[Finding]) -> None:
    document = {
        "role": need.role,
        "series": need.series,
        "backend": need.backend,
        "findings": [finding.as_json() for finding in findings],
        "counts": {level: _count(findings, level) for level in COLOURS},
    }
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_tables(need: Need, findings: Sequence[Finding]) -> None:
    """A table for each area; the fixes stand below it, unbroken, so that they can be copied."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for area, group in groupby(findings, key=lambda finding: finding.area):
        rows = list(group)
        table = Table(title=area, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in ("", "check", "found", "needed"):
            table.add_column(column, overflow="fold", no_wrap=column == "check")
        for row in rows:
            level = row.level.value
            table.add_row(f"[{COLOURS[level]}]{level}[/]", row.check, escape(row.found), escape(row.needed))
        console.print(table)
        for row in rows:
            if row.fix:
                console.print(f"  [{COLOURS[row.level.value]}]{row.check}[/]: {escape(row.fix)}", soft_wrap=True, highlight=False)
    counted = ", ".join(f"{_count(findings, level)} {level}" for level in COLOURS)
    console.print(f"{need.role} on {need.series} with {need.backend}: {counted}")
