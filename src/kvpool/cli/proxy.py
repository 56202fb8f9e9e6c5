"""`kvpool proxy …`: the flags are those of the deployment guides, whose lists of hosts and ports need a parser of their own."""

from __future__ import annotations

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def proxy(context: typer.Context) -> None:
    """Serve clients with prefill and decode engines (`kvpool proxy --help` shows the flags)."""
    from kvpool.proxy.command import main

    raise typer.Exit(main(context.args, prog="kvpool proxy"))
