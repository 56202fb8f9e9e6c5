"""Signed JSON objects: the fields ``issued_at`` and ``signature`` are added to those that are signed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvpool.core.signing import sign, verify

ISSUED_AT, SIGNATURE = "issued_at", "signature"
MAX_AGE_S = 600.0


def canonical(fields: Mapping[str, Any]) -> bytes:
    """One text for equal objects: keys in order, no blanks, ASCII; without the signature. TypeError for what JSON has not."""
    rest = {name: value for name, value in fields.items() if name != SIGNATURE}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sign_fields(secret: bytes, fields: Mapping[str, Any], clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """The fields with the time (seconds since 1970, an integer) and the signature in hexadecimal."""
    dated = {**fields, ISSUED_AT: int(clock())}
    return {**dated, SIGNATURE: sign(secret, canonical(dated)).hex()}


def verify_fields(
    secret: bytes, fields: Mapping[str, Any], max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.time
) -> bool:
    """Whether the fields are signed by somebody with the secret, no longer ago than ``max_age_s`` (and not in the future)."""
    tag, issued = fields.get(SIGNATURE), fields.get(ISSUED_AT)
    if not isinstance(tag, str) or not isinstance(issued, int) or isinstance(issued, bool) or abs(clock() - issued) > max_age_s:
        return False
    try:
        return verify(secret, canonical(fields), bytes.fromhex(tag))
    except (ValueError, TypeError):
        return False
