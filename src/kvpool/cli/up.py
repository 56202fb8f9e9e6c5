"""`kvpool up mixed|pd|separated`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kvpool.ops.launch.options import LaunchDevice, LaunchOptions, Mode

READY_S = 600.0
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
Port = Annotated[int | None, typer.Option(min=1, max=65535, show_default="a free one")]


def up(
    context: typer.Context,
    mode: Annotated[str, typer.Argument(metavar="mixed|pd|separated", help="Which deployment of the guides.")],
    model: Annotated[str, typer.Option(help="A folder, or a name that vLLM finds.")],
    backend: Annotated[str | None, typer.Option(help="local, mooncake, memcache or yuanrong.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: what this host shows.")] = None,
    host: Annotated[str, typer.Option(help="Where requests are taken; everything else is on loopback.")] = "127.0.0.1",
    port: Port = None,
    prefill_port: Port = None,
    decode_port: Port = None,
    kv_port: Port = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Of every engine.")] = 1,
    dram: Annotated[str, typer.Option(help="Memory of the pool, all together.")] = "4GB",
    kv_cache: Annotated[str | None, typer.Option(help="Each engine rank's own cache. On CPUs 1GB, else vLLM decides.")] = None,
    pool: Annotated[str | None, typer.Option(help="local: a pool of this name, which stays. Default: one that goes.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in requests.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the logs in this folder.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until everything must answer.")] = READY_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
) -> None:
    """Start engines, pool and proxy on this host, until Ctrl-C. Arguments after -- go to every engine.

    Nothing is left behind, except for a pool that --pool names and logs in the folder of --logs."""
    from kvpool.ops.launch.options import LaunchOptions, backend_named, check, default_backend
    from kvpool.options.probe import HOST

    where = device or HOST.accelerator() or "cpu"
    try:
        options = LaunchOptions(
            mode=cast("Mode", mode),
            model=os.path.abspath(model) if os.path.isdir(model) else model,
            backend=backend_named(backend) if backend else default_backend(cast("Mode", mode), where),
            device=cast("LaunchDevice", where),
            host=host,
            port=port,
            prefill_port=prefill_port,
            decode_port=decode_port,
            kv_port=kv_port,
            tp=tensor_parallel_size,
            dram=_size("--dram", dram),
            kv_cache=_size("--kv-cache", kv_cache) if kv_cache else (1 << 30 if where == "cpu" else None),
            pool=pool,
            served_name=served_model_name,
            engine_args=tuple(context.args),
        )
        check(options)
        if dry_run:
            _show(options)
            return
        _run(options, logs, timeout)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _size(flag: str, text: str) -> int:
    from kvpool.options.scalars import read_size

    try:
        return read_size(text)
    except ValueError:
        raise ValueError(f"{flag} {text!r}: expected a size such as 1GB") from None


def _show(options: LaunchOptions) -> None:
    from kvpool.ops.launch import make_plan
    from kvpool.ops.launch.place import shown_place
    from kvpool.ops.launch.shell import shown_plan

    typer.echo(shown_plan(make_plan(options, shown_place(options))), nl=False)


def _run(options: LaunchOptions, logs: Path | None, timeout: float) -> None:
    from kvpool.ops.launch import Told, launched

    if logs is not None:
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
    ready = False
    try:
        with launched(options, lambda line: typer.echo(f"up: {line}"), timeout, logs) as (plan, launch):
            ready = True
            typer.echo(f"up: ready: send requests to {plan.url}/v1 (model {plan.model}); Ctrl-C stops everything")
            launch.watch()
    except Told as told:
        if not ready:
            raise typer.Exit(told.exit_code) from None
