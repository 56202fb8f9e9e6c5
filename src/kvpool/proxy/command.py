"""The command behind `kvpool proxy` and the example files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvpool.options.errors import OptionError
from kvpool.proxy.flags import read_flags


def main(given: Sequence[str] | None = None, mode: str | None = None, prog: str | None = None) -> int:
    """Run until told to end; 0, or 2 after one line that says what must not start. ``mode`` None: chosen by a flag."""
    try:
        options = read_flags(prog or os.path.basename(sys.argv[0]), sys.argv[1:] if given is None else given, os.environ, mode)
        try:
            from kvpool.proxy.server import run
        except ModuleNotFoundError as error:
            sys.stderr.write(f"error: the proxy needs the package {error.name}: pip install 'kvpool[proxy]'\n")
            return 2
        run(options)
    except OptionError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0
