"""The `kvpool` command: one file per command group."""

from __future__ import annotations

import typer

from kvpool.cli import config, store

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A KV-cache pool for vLLM.")
app.add_typer(config.app, name="config")
app.add_typer(store.app, name="store")
