"""Digests of weight files: enough of every tensor to tell two checkpoints apart, little enough to take no time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

PIECE = 4096  # bytes sampled of every tensor: its start, middle and end
BLIND_PIECES = 256  # of a file whose inside is not known, evenly spread
BLIND_PIECE = 64 * 1024
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_digest(folder: Path) -> str | None:
    """A digest of the weight files of a folder (or of one file), independent of where it lies; None when there are none."""
    files = [folder] if folder.is_file() else sorted(f for f in folder.iterdir() if f.suffix in WEIGHT_SUFFIXES)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"|{file.name if folder.is_dir() else file.suffix}:{file.stat().st_size}:".encode())
        with file.open("rb") as opened:
            for start, length in _pieces(opened, file):
                opened.seek(start)
                digest.update(opened.read(length))
    return digest.hexdigest()[:32]


def _pieces(file: BinaryIO, path: Path) -> list[tuple[int, int]]:
    size = path.stat().st_size
    if path.suffix == ".safetensors" and (spans := _tensor_spans(file, size)) is not None:
        head, tensors = spans
        pieces = [(0, head)]
        for start, end in tensors:
            last = max(start, end - PIECE)
            pieces += [(at, min(PIECE, end - at)) for at in sorted({start, (start + last) // 2, last})]
        return pieces
    step = max(0, size - BLIND_PIECE)
    return [(step * i // (BLIND_PIECES - 1), BLIND_PIECE) for i in range(BLIND_PIECES)]


def _tensor_spans(file: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Where the header ends and where each tensor lies, from the file's own header; None where it makes no sense."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(size - 8, 256 << 20):
        return None
    try:
        header = json.loads(file.read(length))
        spans = [(8 + length + a, 8 + length + b) for a, b in (v["data_offsets"] for k, v in header.items() if k != "__metadata__")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return 8 + length, sorted(spans)
