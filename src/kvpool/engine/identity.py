"""Model identity: a digest of what a checkpoint computes, never of where it lies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.engine.fingerprint import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Fields that say where a model came from or what wrote the file, not what it computes.
IGNORED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


class Identity(NamedTuple):
    """``private`` tells why the model cannot be told from others, so that its KV must not be shared; empty when it can."""

    text: str
    private: str = ""


def model_identity(config: VllmConfig, cache_namespace: str | None) -> Identity:
    """``name:<cache_namespace>`` where the operator gave one, else a digest of configuration (after overrides) and weights."""
    if cache_namespace:
        return Identity(f"name:{cache_namespace}")
    model, load = config.model_config, config.load_config
    settings = json.dumps(_clean(model.hf_config.to_dict()), sort_keys=True, default=str)
    parts = [settings, str(model.dtype), str(model.quantization), str(load.model_loader_extra_config or "")]
    private = ""
    if str(load.load_format).endswith("dummy"):
        parts.append(f"dummy, seed {model.seed}")
    else:
        weights = _weights(config)
        parts.append(weights or "unknown")
        if weights is None:
            private = f"no weight files of {model.model} were found on this host to tell it by; set cache_namespace to share"
    return Identity(f"sha256:{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}", private)


def _weights(config: VllmConfig) -> str | None:
    model = config.model_config
    for name in (getattr(model, "model_weights", ""), model.model):
        folder = local_folder(str(name), model.revision, config.load_config.download_dir) if name else None
        if folder is not None and (digest := weights_digest(folder)) is not None:
            return digest
    return None


def _clean(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items() if k not in IGNORED}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value


def local_folder(model: str, revision: str | None, cache: str | None) -> Path | None:
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:  # noqa: BLE001 - not in the local cache: the caller treats the model as unknown
        return None
