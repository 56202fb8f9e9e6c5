"""Adapters: vLLM's block hashes name one by name and path, but the pool outlives both, so its files are in the key too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.engine.fingerprint import weights_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

CACHE_LIMIT = 1024
Stamp = tuple[tuple[str, int, int], ...]


class AdapterDigests:
    """Digests of adapter folders, read again when a file has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, str | None]] = {}

    def digest(self, adapter: LoRARequest | None) -> str | None:
        """``""`` without an adapter; None for one whose files cannot be read here: its KV is not pooled."""
        if adapter is None:
            return ""
        folder = Path(adapter.lora_path)
        try:
            stamp = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()))
            known = self._known.get(adapter.lora_path)
            if known is None or known[0] != stamp:
                if len(self._known) >= CACHE_LIMIT:
                    self._known.clear()
                known = self._known[adapter.lora_path] = (stamp, weights_digest(folder))
        except OSError:
            return None
        return known[1]
