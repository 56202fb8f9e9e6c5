"""`kvpool warmup URL`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

INSTEAD = {"requests": ("devices",), "prompts": ("requests", "tokens", "devices")}
"""Options, and those that have no effect beside them."""


def warmup(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="An engine or a proxy: http://host:port, or with /v1")],
    devices: Annotated[int, typer.Option(min=1, help="Devices behind it; three requests for each.")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="That many requests instead.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; fewer where the model cannot take so many.")] = 8192,
    prompts: Annotated[Path | None, typer.Option(help="Prompts of your own instead, one on each line of a file.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that is served.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one request.")] = 600.0,
) -> None:
    """Send long prompts with one answered token each, so that connections and buffers exist before the first user comes."""
    from kvpool.ops.warmup import Warmup

    try:
        _refuse_unused(context)
        lines = None if prompts is None else _read(prompts)
        plan = Warmup(url, timeout, os.environ.get("OPENAI_API_KEY"))
        done = plan.run(model, lines, requests or 3 * devices, tokens, concurrency)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for text in done.failures:
        typer.echo(f"failed: {text}", err=True)
    typer.echo(f"warmup: {done.answered} of {done.sent} requests of {done.words} answered in {done.seconds:.1f} s")
    if done.failures:
        raise typer.Exit(1)


def _refuse_unused(context: typer.Context) -> None:
    """OptionError for an option that another one makes ineffective."""
    from kvpool.options import OptionError

    given = {name for name in context.params if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"}
    for winner, losers in INSTEAD.items():
        for name in losers:
            if winner in given and name in given:
                raise OptionError(f"--{name}", context.params[name], f"has no effect with --{winner}: leave out one of the two")


def _read(path: Path) -> list[str]:
    """The prompts of a file. OptionError where there are none."""
    from kvpool.options import OptionError

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError("--prompts", str(path), f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise OptionError("--prompts", str(path), "is no text in UTF-8") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise OptionError("--prompts", str(path), "holds no prompts; accepted: a file with one prompt on each line")
    return prompts
