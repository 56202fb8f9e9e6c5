"""`kvpool demo --pd`"""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    pd: Annotated[bool, typer.Option("--pd", help="Prefill, decode, pool and proxy: a conversation of two turns.")] = False,
) -> None:
    """See it work with a small real model. The last line is RESULT …; exit status 1 where it is not what it should be."""
    from kvpool.ops.demo import pd as pair
    from kvpool.ops.launch import Told

    if not pd:
        typer.echo("error: choose a demo (accepted: --pd)", err=True)
        raise typer.Exit(2)
    try:
        code = pair.run(lambda line: typer.echo(f"demo: {line}"))
    except Told as told:
        raise typer.Exit(told.exit_code) from None
    except (OSError, ValueError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)
