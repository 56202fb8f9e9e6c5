"""`kvpool config …`"""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.options import Deployment, OptionError
from kvpool.options.check import Checked, check, the_cleaned
from kvpool.options.deployment import Hardware
from kvpool.options.environment import check_hash_algo
from kvpool.options.probe import HOST, Device

app = typer.Typer(no_args_is_help=True, help="Check configurations.")


class DeviceName(enum.Enum):
    """Kinds of devices, and series of NPUs."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    A2 = "A2"
    A3 = "A3"
    A5 = "A5"


Transfer = Annotated[
    str | None, typer.Argument(metavar="KV_TRANSFER_CONFIG", help="The JSON given to --kv-transfer-config.", show_default=False)
]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file", help="mooncake.json, mmc-local.conf, mmc-meta.conf, yuanrong.json or a kv-transfer-config; told apart by content."
    ),
]
AdditionalConfig = Annotated[str | None, typer.Option("--additional-config", help="The JSON given to --additional-config.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Fix = Annotated[
    Path | None, typer.Option("--fix", metavar="OUT", help="Remove comments and the like, and write the clean text to OUT.")
]
HashAlgorithm = Annotated[str | None, typer.Option("--hash-algo", help="The engine's --prefix-caching-hash-algo.")]
Where = Annotated[
    DeviceName | None, typer.Option("--device", help="Where the KV lies. Unset: what this host shows.", case_sensitive=False)
]
Ranks = Annotated[int | None, typer.Option("--ranks", min=1, help="Ranks of the engines on this host.")]
Hosts = Annotated[int | None, typer.Option("--hosts", min=1, help="Hosts that share the pool.")]
Meta = Annotated[
    str | None, typer.Option("--meta", metavar="FILE", help="mmc-meta.conf to compare with. Unset: MMC_META_CONFIG_PATH.")
]
Services = Annotated[
    list[str] | None,
    typer.Option("--service", metavar="COMMAND", help="A command that starts a service: mooncake_master … or dscli start …."),
]
ProxyPort = Annotated[int | None, typer.Option("--proxy-port", min=1, max=65535, help="The port of the proxy.")]


@app.callback()
def config() -> None:
    """Check configurations before an engine starts."""


@app.command("check", no_args_is_help=True)
def check_command(
    transfer: Transfer = None,
    file: Files = None,
    additional_config: AdditionalConfig = None,
    as_json: AsJson = False,
    fix: Fix = None,
    hash_algo: HashAlgorithm = None,
    device: Where = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    meta: Meta = None,
    service: Services = None,
    proxy_port: ProxyPort = None,
) -> None:
    """Print the effective options, where each value comes from, and warnings; exit 2 with one line for what must not start."""
    try:
        checked = check(
            transfer,
            file or [],
            os.environ,
            additional=additional_config,
            fix=fix is not None,
            deployment=_deployment(device, ranks, hosts, hash_algo),
            meta=meta,
            services=service or [],
            proxy_port=proxy_port,
        )
        if fix is not None:
            fix.write_text(the_cleaned(checked), encoding="utf-8")
    except (OptionError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    _print_json(checked) if as_json else _print_tables(checked)


def _deployment(device: DeviceName | None, ranks: int | None, hosts: int | None, hash_algo: str | None) -> Deployment:
    """A series of NPUs is a device too; where nothing is said, an accelerator that this host shows is taken."""
    hardware: Hardware | None = None
    kind: Device | None = HOST.accelerator()
    if device in (DeviceName.A2, DeviceName.A3, DeviceName.A5):
        kind, hardware = "npu", cast(Hardware, device.value)
    elif device is not None:
        kind = cast(Device, device.value)
    check_hash_algo(hash_algo)
    return Deployment(device=kind, hardware=hardware, local_ranks=ranks, hosts=hosts, hash_algo=hash_algo)


def _print_json(checked: Checked) -> None:
    document = {
        "sections": [section.as_json() for section in checked.sections],
        "warnings": checked.warnings,
        "removed": checked.removed,
        "notes": checked.notes,
    }
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_tables(checked: Checked) -> None:
    console = Console()
    for section in checked.sections:
        table = Table(title=escape(section.title), title_justify="left")
        for column in ("key", "value", "source"):
            table.add_column(column, overflow="fold")
        for row in section.rows:
            table.add_row(row.key, escape(json.dumps(row.value, ensure_ascii=False)), escape(row.source))
        console.print(table)
    for line in checked.removed:
        console.print(escape(line), style="green", soft_wrap=True)
    for line in checked.notes:
        console.print(f"note: {escape(line)}", soft_wrap=True)
    for line in checked.warnings:
        console.print(f"warning: {escape(line)}", style="yellow", soft_wrap=True)
