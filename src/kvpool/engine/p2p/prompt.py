"""What a prompt's KV depends on, as a digest: decode never reads the KV of another prompt, whatever a proxy mixes up."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_digest(request: Request, unit: int) -> str | None:
    """vLLM's own hash of the prompt's whole blocks (which commits to images, adapter and salt), and the tokens behind them.

    ``unit`` is the tokens per hash. None where the prompt is not made of tokens alone, so that it cannot be told.
    """
    tokens = request.prompt_token_ids
    if tokens is None:
        return None
    whole = len(tokens) // unit
    if len(request.block_hashes) < whole:
        return None
    last: bytes = request.block_hashes[whole - 1] if whole else b""
    lora = request.lora_request
    rest = {
        "tokens": len(tokens),
        "tail": list(tokens[whole * unit :]),
        "salt": request.cache_salt,
        "adapter": lora.lora_name if lora is not None else None,
        "media": [feature.identifier for feature in request.mm_features or ()],
    }
    return hashlib.sha256(last + json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]
