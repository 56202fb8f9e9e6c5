"""Namespaces: the fingerprint of everything that two engines must agree on to share KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OBJECT_FORMAT = 1


@dataclass(frozen=True)
class NamespaceInputs:
    """What shapes the bytes of a block, true for every rank and mode of compatible engines.

    Nothing here depends on rank, tensor or pipeline size, physical layer order, store or draft layers.
    """

    model: str  # digest of configuration and weights, or the operator's own name
    kv_dtype: str
    page_format: str  # attention backend, axis order inside a page, packing (CPU: instruction set)
    token_head_bytes: tuple[int, ...]  # bytes per token and head of each distinct tensor, sorted
    groups: tuple[str, ...]  # kind, block size and window of each KV-cache group
    num_layers: int  # of the target model
    hash_block_size: int
    hash_probe: str = ""  # algorithm and the hash of a fixed token list: tells differing PYTHONHASHSEED
    epoch: str = "0"  # raised by reset_cache and in-place weight updates
    object_format: int = OBJECT_FORMAT
    extra: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical: sorted keys, no blanks."""
        fields = {k: getattr(self, k) for k in self.__dataclass_fields__}
        fields["extra"] = dict(self.extra)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The namespace: 16 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def differing_fields(ours: str, theirs: str) -> dict[str, tuple[Any, Any]]:
    """Fields in which two namespace records (``to_json`` texts) differ: name -> (ours, theirs). Empty when either is no record."""
    try:
        a, b = json.loads(ours), json.loads(theirs)
    except ValueError:
        return {}
    if not isinstance(a, dict) or not isinstance(b, dict):
        return {}
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}
