"""Adapters: vLLM's block hashes name one by name and path, but the pool outlives both, so its files are in the key too."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from kvpool.engine.fingerprint import WEIGHT_SUFFIXES, weights_digest

SMALL = 1 << 20  # files up to this size that are no weights count whole: the settings are among them
Stamp = tuple[tuple[str, int, int, int, int], ...]


class AdapterDigests:
    """Digests of adapter folders, each as it was when this engine first saw it. Thread-safe; reads files, so not for the
    engine's thread.

    A folder that changes later is not pooled again until the engine restarts: nobody outside the worker knows when, or whether,
    it loads the new files.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Stamp, str]] = {}
        self.retired: set[str] = set()

    def digest(self, path: str) -> str | None:
        """None for an adapter whose files cannot be read here or have changed: its KV is not pooled."""
        folder = Path(path)
        try:
            with self._lock:
                known = self._known.get(path)
                stamp = _stamp(folder)
                if known is None:
                    known = self._known[path] = (stamp, _digest(folder))
        except OSError:
            return None
        if known[0] != stamp:
            self.retired.add(known[1])
        return None if known[1] in self.retired else known[1]


def _stamp(folder: Path) -> Stamp:
    infos = [(f.name, f.stat()) for f in sorted(folder.iterdir())]
    return tuple((name, i.st_size, i.st_mtime_ns, i.st_ctime_ns, i.st_ino) for name, i in infos)


def _digest(folder: Path) -> str:
    """OSError where there are no weights."""
    weights = weights_digest(folder)
    if weights is None:
        raise FileNotFoundError(f"{folder} holds no weights")
    digest = hashlib.sha256(weights.encode())
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and file.stat().st_size <= SMALL:
            digest.update(f"|{file.name}:".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
