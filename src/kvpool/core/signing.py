"""Messages between engines and proxies, signed with the secret that they share: HMAC-SHA256."""

from __future__ import annotations

import hashlib
import hmac

SECRET_VARIABLE = "KVPOOL_SECRET"


def sign(secret: bytes, payload: bytes) -> bytes:
    """The tag of a payload, 32 bytes."""
    return hmac.digest(secret, payload, hashlib.sha256)


def verify(secret: bytes, payload: bytes, tag: bytes) -> bool:
    """Whether ``tag`` is that of the payload; takes as long for a wrong one as for the right one."""
    return hmac.compare_digest(sign(secret, payload), tag)
