"""Reads a configuration file as text, with errors that name the variable or flag it came from."""

from __future__ import annotations

from pathlib import Path

from kvpool.options.errors import OptionError

MAX_FILE_SIZE = 1 << 20


def read_text(path: str, key: str) -> str:
    """The text of a configuration file that ``key`` (a variable or a flag) points to."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_SIZE + 1)
    except OSError as error:
        raise OptionError(key, path, f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_SIZE:
        raise OptionError(key, path, "is larger than 1MB and so no configuration file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(key, path, f"is not UTF-8 text (byte {error.start})") from None
