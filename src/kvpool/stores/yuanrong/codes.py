"""Errors of the library: RuntimeErrors whose text holds ``code: [...]``."""

from __future__ import annotations

import re

from kvpool.stores.base import Result, Status

_CODE = re.compile(r"code:\s*\[([^\]]+)\]")
NOT_FOUND = "Key not found"
_STATUS = {
    NOT_FOUND: Status.MISSING,
    "Out of memory": Status.NO_SPACE,
    "No space available": Status.NO_SPACE,
    "Not authorized": Status.FATAL,
}
_NOISE = re.compile(r"Thread ID \d+ |Line of code\s*: \d+|File\s*: [\w.]+|,? ?traceId\s*: [\w-]+")
_LONGEST = 300


class LibraryError(OSError):
    """The library said no; the text is its own."""


def code_of(text: str) -> str:
    """The native code of an error, a phrase; empty where the text has none."""
    match = _CODE.search(text)
    return match.group(1).strip() if match else ""


def result_of(text: str) -> Result:
    """What an error means for the keys of its call. What is not known is taken for a passing fault.

    A worker that finds no room is asked again until the request timeout; the code is then that of the last try, and only the text
    tells what the earlier ones said."""
    status = _STATUS.get(code_of(text), Status.TRANSIENT)
    if status is Status.TRANSIENT and "Out of memory" in text:
        status = Status.NO_SPACE
    return Result(status, text=brief(text))


def brief(text: str) -> str:
    """One line of a native text, without the places in its source."""
    line = " ".join(_NOISE.sub("", text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
