"""`kvpool warmup URL`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def warmup(
    url: Annotated[str, typer.Argument(help="An engine or a proxy: http://host:port")],
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
        lines = None if prompts is None else [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        plan = Warmup(url.rstrip("/"), timeout, os.environ.get("OPENAI_API_KEY"))
        done = plan.run(model, lines, requests or 3 * devices, tokens, concurrency)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    for text in done.failures:
        typer.echo(f"failed: {text}", err=True)
    typer.echo(f"warmup: {done.answered} of {done.sent} requests of {done.words} answered in {done.seconds:.1f} s")
    if done.failures:
        raise typer.Exit(1)
