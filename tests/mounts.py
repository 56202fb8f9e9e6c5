"""Small filesystems of their own for tests of want of room; skipped where nothing can be mounted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, kind: str, options: str = "mode=700") -> Iterator[Path]:
    """``folder`` is made, mounted (``tmpfs`` or ``ramfs``) and unmounted again."""
    folder.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
