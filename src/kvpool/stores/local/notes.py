"""Notes: small texts that engines leave in the pool directory for those that come later, one file each."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from kvpool.stores.local.pool_dir import PoolDir

MAX_NOTE = 1 << 16
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def write_note(directory: PoolDir, name: bytes, text: str) -> None:
    """Whole or not at all: written aside, then renamed. OSError with the reason."""
    folder = directory.make_dir("notes")
    try:
        aside = f".{secrets.token_hex(8)}"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode()[:MAX_NOTE])
        os.replace(aside, name.hex(), src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def read_notes(directory: PoolDir, prefix: bytes) -> dict[bytes, str]:
    """The notes whose names start with ``prefix``."""
    folder = directory.make_dir("notes")
    found: dict[bytes, str] = {}
    try:
        for entry in os.listdir(folder):
            with suppress(ValueError, FileNotFoundError):  # half-written ones have no name in hex; others may go meanwhile
                name = bytes.fromhex(entry)
                if name.startswith(prefix):
                    with os.fdopen(os.open(entry, os.O_RDONLY | _FLAGS, dir_fd=folder), "rb") as file:
                        found[name] = file.read(MAX_NOTE).decode(errors="replace")
    finally:
        os.close(folder)
    return found
