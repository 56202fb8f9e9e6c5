"""KVPOOL_SECRET, read in one way by prefill, decode and proxy."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.options.errors import OptionError

SECRET_VARIABLE = "KVPOOL_SECRET"  # the same on all engines and proxies
MIN_SECRET = 16  # characters


def shared_secret(env: Mapping[str, str]) -> bytes | None:
    """None where it is not set. OptionError, which does not show it, where it is too short to be one."""
    text = env.get(SECRET_VARIABLE, "")
    if text and len(text) < MIN_SECRET:
        raise OptionError(SECRET_VARIABLE, f"{len(text)} characters", f"accepted: at least {MIN_SECRET} characters")
    return text.encode() or None
