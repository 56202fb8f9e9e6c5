"""What the pool knows of a key. The library tells an object from one that is being written only by two calls together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.stores.memcache.library import Client

PLAIN = 0
"""The flag of batch_get_key_info that only looks. With the other one the library leases what it finds."""


class KeyState(NamedTuple):
    """``start`` is the address of what is stored or being written under the key, 0 where there is nothing; ``nbytes`` its length.
    ``code`` is the library's, when it could not tell."""

    readable: bool = False
    start: int = 0
    nbytes: int = 0
    code: int = 0


def key_states(client: Client, keys: Sequence[str]) -> list[KeyState]:
    """In this order: what becomes readable between the two calls is told as being written, never as free."""
    if not keys:
        return []
    found = client.batch_is_exist(keys)
    infos = client.batch_get_key_info(keys, PLAIN)
    states = []
    for code, info in zip(found, infos, strict=True):
        start = next(iter(info.gva_list()), 0) if info.size() > 0 else 0
        states.append(KeyState(code == 1 and start != 0, start, info.size(), min(code, 0)))
    return states
