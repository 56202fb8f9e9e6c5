"""Keys: what names an object in every store.

A key is ``v1:<namespace>:<group>:<shard>:<block hash>`` in ASCII, of ``[A-Za-z0-9:_-]`` and under 255 bytes, so no store has to
rewrite it. It says what is inside, never who wrote it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

KEY_VERSION = "v1"
_REWRITTEN = re.compile(r"-[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which heads, layers and context-parallel slice an object holds. Bounds are inclusive; ``layers`` is sorted."""

    first_head: int
    last_head: int
    layers: tuple[int, ...]
    pcp_rank: int = 0
    dcp_rank: int = 0
    note: str = ""  # where heads alone do not say what is inside

    def __str__(self) -> str:
        return f"h{self.first_head}-{self.last_head}{self.note}_l{_layer_span(self.layers)}_c{self.pcp_rank}_{self.dcp_rank}"


def _layer_span(layers: tuple[int, ...]) -> str:
    """``0-11`` for a run, ``0-10s2`` for every second one, else the bounds and a digest of the exact set."""
    first, last = layers[0], layers[-1]
    steps = {b - a for a, b in pairwise(layers)} or {1}
    if steps == {1}:
        return f"{first}-{last}"
    if len(steps) == 1:
        return f"{first}-{last}s{steps.pop()}"
    return f"{first}-{last}x{hashlib.sha256(repr(layers).encode()).hexdigest()[:12]}"


def key_prefix(namespace: str, group: int, shard: Shard | str) -> bytes:
    """Everything of a key but the block hash."""
    return f"{KEY_VERSION}:{namespace}:{group}:{shard}:".encode()


def namespace_prefix(namespace: str) -> bytes:
    """What every key of a namespace starts with."""
    return f"{KEY_VERSION}:{namespace}:".encode()


def block_key(prefix: bytes, block_hash: bytes) -> bytes:
    """The key of one block; ``block_hash`` is vLLM's own, raw (any bytes-like of any length)."""
    return prefix + block_hash.hex().encode()


def block_keys(prefix: bytes, hashes: Iterable[bytes]) -> list[bytes]:
    """``block_key`` for many blocks."""
    return [prefix + h.hex().encode() for h in hashes]


def group_hashes(hashes: Sequence[bytes], units: int, first: int, last: int) -> list[bytes]:
    """The hashes that name group blocks ``first`` to ``last`` (exclusive), where a group block spans ``units`` hash units.

    Hashes are chained, so the last unit's hash commits to the whole block and its prefix. Stops early where hashes end.
    """
    end = min(last, len(hashes) // units)
    return list(hashes[first * units + units - 1 : end * units : units]) if end > first else []


def fit_key(key: str, charset: frozenset[str], max_len: int) -> str:
    """Map a key into what a backend allows: unchanged where it fits, else cleaned, cut and ended by a 128-bit digest.

    Deterministic across processes and injective but for a digest collision: a key that was rewritten ends in ``-`` and 32 hex
    digits of the SHA-256 of the original, and a key that ends like that by itself is rewritten too, so none is taken for another.
    ``max_len`` is in characters and must be at least 40.
    """
    if max_len < 40:
        raise ValueError(f"max_len {max_len} is too short for a digest (at least 40)")
    if len(key) <= max_len and charset.issuperset(key) and not _REWRITTEN.search(key):
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    clean = "".join(c if c in charset else "_" for c in key[: max_len - 33])
    return f"{clean}-{digest}"
