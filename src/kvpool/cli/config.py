"""`kvpool config …`"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.options import Deployment, OptionError
from kvpool.options.check import Checked, check, the_cleaned

app = typer.Typer(no_args_is_help=True, help="Check configurations.")


@app.callback()
def config() -> None:
    """Check configurations before an engine starts."""


@app.command("check", no_args_is_help=True)
def check_command(
    transfer: Annotated[
        str | None, typer.Argument(metavar="KV_TRANSFER_CONFIG", help="The JSON given to --kv-transfer-config.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            help="mooncake.json, mmc-local.conf, mmc-meta.conf, yuanrong.json or a kv-transfer-config; told apart by content.",
        ),
    ] = None,
    additional_config: Annotated[
        str | None, typer.Option("--additional-config", help="The JSON given to --additional-config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    fix: Annotated[
        Path | None, typer.Option("--fix", metavar="OUT", help="Remove comments and the like, and write the clean text to OUT.")
    ] = None,
    hash_algo: Annotated[str | None, typer.Option("--hash-algo", help="The engine's --prefix-caching-hash-algo.")] = None,
) -> None:
    """Print the effective options, where each value comes from, and warnings; exit 2 with one line for what must not start."""
    try:
        checked = check(
            transfer,
            file or [],
            os.environ,
            additional=additional_config,
            fix=fix is not None,
            deployment=Deployment(hash_algo=hash_algo),
        )
        if fix is not None:
            fix.write_text(the_cleaned(checked), encoding="utf-8")
    except (OptionError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    _print_json(checked) if as_json else _print_tables(checked)


def _print_json(checked: Checked) -> None:
    document = {
        "sections": [section.as_json() for section in checked.sections],
        "warnings": checked.warnings,
        "removed": checked.removed,
    }
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_tables(checked: Checked) -> None:
    console = Console()
    for section in checked.sections:
        table = Table("key", "value", "source", title=escape(section.title), title_justify="left")
        for row in section.rows:
            table.add_row(row.key, escape(json.dumps(row.value, ensure_ascii=False)), escape(row.source))
        console.print(table)
    for line in checked.removed:
        console.print(escape(line), style="green", soft_wrap=True)
    for line in checked.warnings:
        console.print(f"warning: {escape(line)}", style="yellow", soft_wrap=True)
