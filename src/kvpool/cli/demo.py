"""`kvpool demo --pd`"""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    pd: Annotated[bool, typer.Option("--pd", help="Prefill, decode, pool and proxy: a conversation of two turns.")] = False,
) -> None:
    """See it work with a small real model. The last line is RESULT …; exit status 1 where it is not what it should be."""
    from kvpool.ops.launch.guard import guarded

    if not pd:
        typer.echo("error: choose a demo (accepted: --pd)", err=True)
        raise typer.Exit(2)
    raise typer.Exit(guarded(_run, _say))


def _run() -> int:
    from kvpool.ops.demo import pd as pair
    from kvpool.ops.launch import Told

    try:
        return pair.run(_say)
    except Told as told:
        return told.exit_code
    except (OSError, ValueError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        return 2


def _say(line: str) -> None:
    typer.echo(f"demo: {line}")
