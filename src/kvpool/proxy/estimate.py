"""How much work a request is, before anybody has tokenized it, and which other requests begin like it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

CHARS_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 8
TOKENS_PER_ATTACHMENT = 512
PREFIX_CHARS, PREFIX_TOKENS = 2048, 512


def tokens(body: Mapping[str, Any]) -> int:
    """Tokens of the prompt: exact for token ids, a quarter of the bytes for text. At least 1."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return max(1, _of_text(body.get("prompt")))
    total = sum(TOKENS_PER_MESSAGE + _of_content(message.get("content")) for message in messages if isinstance(message, dict))
    return max(1, total + _of_tools(body.get("tools")))


def prefix(body: Mapping[str, Any]) -> bytes | None:
    """A digest of how the prompt begins, of model and cache salt: equal for all turns of a conversation. None without a prompt."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list) and messages:
        begin = repr(messages[:2])[:PREFIX_CHARS]
    elif isinstance(prompt, str) and prompt:
        begin = prompt[:PREFIX_CHARS]
    elif isinstance(prompt, list) and prompt:
        begin = repr(prompt[0])[:PREFIX_CHARS] if not isinstance(prompt[0], int) else repr(prompt[:PREFIX_TOKENS])
    else:
        return None
    text = "\0".join((str(body.get("model")), str(body.get("cache_salt")), begin))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _of_text(value: object) -> int:
    if isinstance(value, str):
        return len(value) // CHARS_PER_TOKEN if value.isascii() else len(value.encode("utf-8", "surrogatepass")) // CHARS_PER_TOKEN
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], int) else sum(map(_of_text, value))
    return 0


def _of_content(content: object) -> int:
    if not isinstance(content, list):
        return _of_text(content)
    return sum(_of_part(part) for part in content if isinstance(part, dict))


def _of_part(part: Mapping[str, Any]) -> int:
    text = part.get("text")
    return _of_text(text) if isinstance(text, str) else TOKENS_PER_ATTACHMENT


def _of_tools(tools: object) -> int:
    return len(repr(tools)) // CHARS_PER_TOKEN if isinstance(tools, Sequence) and not isinstance(tools, str) else 0
