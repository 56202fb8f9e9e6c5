"""KVPOOL_SECRET: what prefill, decode and proxy sign their messages with."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.options.errors import OptionError

VARIABLE = "KVPOOL_SECRET"
MIN_CHARACTERS = 16


def read_secret(env: Mapping[str, str]) -> bytes | None:
    """None where it is unset or empty. OptionError, which does not show it, where it is too short to be one."""
    text = env.get(VARIABLE, "")
    if text and len(text) < MIN_CHARACTERS:
        raise OptionError(VARIABLE, f"{len(text)} characters", f"accepted: at least {MIN_CHARACTERS} characters")
    return text.encode() or None
