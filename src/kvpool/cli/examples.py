"""`kvpool examples DIR`"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer


def examples(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them; made where it does not exist.")],
) -> None:
    """Write the example files of the deployment guides: disaggregated_prefill_v1/load_balance_proxy_….py."""
    with resources.as_file(resources.files("kvpool") / "examples") as source:
        for path in sorted(source.glob("*/*.py")):
            target = folder / path.relative_to(source)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            except OSError as error:
                typer.echo(f"error: {target}: {error.strerror}", err=True)
                raise typer.Exit(2) from None
            typer.echo(str(target))
