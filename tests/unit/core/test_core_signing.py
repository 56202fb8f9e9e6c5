"""Signatures: only the same secret over the same bytes verifies."""

from __future__ import annotations

import pytest

from kvpool.core.signing import sign, verify


def test_a_signature_is_known_and_verifies():
    tag = sign(b"key", b"The quick brown fox jumps over the lazy dog")
    assert tag.hex() == "f7bc83f430538424b13298e6aa6fb143ef4d59a14946175997479dbc2d1a3cd8"
    assert verify(b"key", b"The quick brown fox jumps over the lazy dog", tag)


@pytest.mark.parametrize(
    ("secret", "payload", "change"), [(b"other", b"x", 0), (b"key", b"y", 0), (b"key", b"x", 1), (b"", b"x", 0)]
)
def test_anything_else_does_not(secret, payload, change):
    tag = bytearray(sign(b"key", b"x"))
    tag[0] ^= change
    assert not verify(secret, payload, bytes(tag))


def test_a_tag_of_another_length_is_only_wrong():
    assert not verify(b"key", b"x", b"")
