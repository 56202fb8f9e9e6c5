"""The `kvpool` command: one file per command group."""

from __future__ import annotations

import typer

from kvpool.cli import acceptance, config, demo, examples, proxy, service, size, store, up, warmup
from kvpool.cli.conformance import conformance
from kvpool.cli.doctor import doctor

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A KV-cache pool for vLLM.")
app.add_typer(config.app, name="config")
for command in (service.start, service.stop, service.status, conformance):
    store.app.command()(command)
app.add_typer(store.app, name="store")
app.command("proxy", add_help_option=False, context_settings=proxy.CONTEXT)(proxy.proxy)
app.command("up", no_args_is_help=True, context_settings=up.CONTEXT)(up.up)
app.command("demo", no_args_is_help=True)(demo.demo)
app.command("acceptance", no_args_is_help=True, context_settings=acceptance.CONTEXT)(acceptance.acceptance)
app.command("examples", no_args_is_help=True)(examples.examples)
app.command("size", no_args_is_help=True)(size.size)
app.command("warmup", no_args_is_help=True)(warmup.warmup)
app.command("doctor")(doctor)
