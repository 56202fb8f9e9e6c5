"""Keys as the datasystem takes them.

What a key may be made of differs by version: 0.8.1 takes at most 255 characters out of ``NARROW``, later versions 1024 and a few
characters more. Clients of different versions may share one cluster, so every key is fitted to the narrowest rule: the same key has
the same name whoever writes it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from kvpool.core.keys import fit_key

MAX_NAME = 255
NARROW = frozenset(string.ascii_letters + string.digits + "-_!@#%^*()+=:;")
PROBE = ("".join(sorted(NARROW)) * 4)[:MAX_NAME]
"""A name of every allowed character and the full length: a library that takes it in a lookup takes all our names."""


def name_of(key: bytes) -> str:
    """The datasystem's name of a key; keys that kvpool makes are unchanged. Injective, the same in all processes."""
    return fit_key(key.decode("latin-1"), NARROW, MAX_NAME)


def names_of(keys: Iterable[bytes]) -> list[str]:
    return [name_of(key) for key in keys]
