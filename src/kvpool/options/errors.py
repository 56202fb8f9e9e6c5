"""Errors of the configuration: always one line, naming the key, its value and what would be accepted."""

from __future__ import annotations

import json
from typing import Final


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()
"""Stands for "no value to show", since None is a value that an operator can write (null)."""


def shown(value: object, limit: int = 120) -> str:
    """A value as an operator would write it in JSON, on one line and at most ``limit`` characters long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = text.replace("\r", "\\r").replace("\n", "\\n")
    return text if len(text) <= limit else text[: limit - 1] + "…"


class OptionError(ValueError):
    """A configuration that must not start. ``where`` is the file or connector that holds the key."""

    def __init__(self, key: str, value: object, reason: str, *, where: str = "") -> None:
        self.key = key
        self.value = value
        self.reason = reason
        self.where = where
        subject = key if value is UNSET else f"{key}={shown(value)}"
        super().__init__(f"{where}: {subject}: {reason}" if where else f"{subject}: {reason}")


class NotAvailableError(OptionError):
    """The configuration is valid, but switches on something that this version does not have."""
