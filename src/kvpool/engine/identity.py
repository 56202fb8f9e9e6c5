"""Model identity: a digest of what a checkpoint computes, never of where it lies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# Fields that say where a model came from or what wrote the file, not what it computes.
IGNORED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def model_identity(config: VllmConfig, cache_namespace: str | None) -> str:
    """``name:<cache_namespace>`` where the operator gave one, else a digest of configuration (after overrides) and weights."""
    if cache_namespace:
        return f"name:{cache_namespace}"
    model = config.model_config
    digest = hashlib.sha256()
    digest.update(json.dumps(_clean(model.hf_config.to_dict()), sort_keys=True, default=str).encode())
    digest.update(f"{model.dtype}|{model.quantization}|{config.load_config.load_format}".encode())
    if str(config.load_config.load_format).endswith("dummy"):
        digest.update(f"|dummy:{model.seed}".encode())
    else:
        folder = _local_folder(model.model, model.revision)
        if folder is None:
            digest.update(f"|{model.model}@{model.revision}".encode())
        else:
            _add_weights(digest, folder)
    return f"sha256:{digest.hexdigest()[:32]}"


def _clean(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items() if k not in IGNORED}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value


def _local_folder(model: str, revision: str | None) -> Path | None:
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - not in the local cache: the caller falls back on name and revision
        return None


def _add_weights(digest: Any, folder: Path) -> None:  # noqa: ANN401
    """Size, head (for safetensors: the whole header) and evenly spread samples of each weight file, by name."""
    files = [folder] if folder.is_file() else sorted(f for f in folder.iterdir() if f.suffix in WEIGHT_SUFFIXES)
    for file in files:
        size = file.stat().st_size
        digest.update(f"|{file.name if folder.is_dir() else file.suffix}:{size}:".encode())
        with file.open("rb") as weights:
            head = weights.read(8)
            header = int.from_bytes(head, "little") if file.suffix == ".safetensors" else SAMPLE_BYTES
            digest.update(head + weights.read(min(header, 64 << 20)))
            for i in range(SAMPLES):
                weights.seek(max(0, size - SAMPLE_BYTES) * i // max(1, SAMPLES - 1))
                digest.update(weights.read(SAMPLE_BYTES))
