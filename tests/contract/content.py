"""What KV memory must hold: bytes that follow from the whole prefix of a token, its layer and its head, as a model's would."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.contract.spec import WORDS

if TYPE_CHECKING:
    from vllm.v1.request import Request

Int64 = NDArray[np.int64]
POISON_TOKEN = 1  # what the harness samples from wrong KV; no right output ever has it
FIRST_TOKEN, TOKENS = 10, 1900
MODULUS = (1 << 61) - 1


def root(lora: str | None, salt: str | None) -> int:
    return zlib.crc32(repr((lora, salt)).encode())


def extend(state: int, token: int, extra: int = 0) -> int:
    """The prefix state after one more token."""
    return (state * 6364136223846793005 + (token + 1) * 1442695040888963407 + extra) % MODULUS


def sample(state: int) -> int:
    """The next token, from the prefix state alone."""
    return FIRST_TOKEN + (state >> 7) % TOKENS


def expected_output(prompt: Sequence[int], count: int, lora: str | None = None, salt: str | None = None) -> list[int]:
    """What a right engine answers."""
    state = root(lora, salt)
    for token in prompt:
        state = extend(state, token)
    output = []
    for _ in range(count):
        output.append(sample(state))
        state = extend(state, output[-1])
    return output


def values(states: Int64, layers: Sequence[int], heads: range, weights: int) -> Int64:
    """The KV of tokens with these prefix states: int64 [tokens, layers, heads, WORDS], by weights version."""
    layer_part = np.asarray(layers, dtype=np.int64) * 1000003
    head_part = np.arange(heads.start, heads.stop, dtype=np.int64) * 10007
    word_part = np.arange(WORDS, dtype=np.int64) * 101
    with np.errstate(over="ignore"):
        mixed = states[:, None, None, None] * np.int64(2654435761) + np.int64(weights * 7919)
        return mixed + layer_part[None, :, None, None] + head_part[None, None, :, None] + word_part[None, None, None, :]


class Prefixes:
    """Prefix states of live requests, and of every block hash seen."""

    def __init__(self, unit: int, remember_blocks: bool = True) -> None:
        self._unit = unit
        self._states: dict[str, list[int]] = {}
        self._seen: dict[str, int] = {}
        self._blocks: dict[bytes, list[int]] = {}  # block hash -> states of all tokens up to its end, shared
        self.remember = remember_blocks

    def of(self, request: Request, drafts: Sequence[int] = ()) -> Int64:
        """State after each token of the request, drafts included."""
        states = self._states.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        state = states[-1] if states else self._root(request)
        images = {f.mm_position.offset: zlib.crc32(f.identifier.encode()) for f in request.mm_features or ()}
        for position in range(len(states), len(tokens)):
            state = extend(state, tokens[position], images.get(position, 0))
            states.append(state)
        if self.remember:
            self._note_blocks(request, states)
        more = []
        for token in drafts:
            state = extend(state, token)
            more.append(state)
        return np.array(states + more, dtype=np.int64)

    def _root(self, request: Request) -> int:
        lora = request.lora_request.lora_name if request.lora_request is not None else None
        return root(lora, request.cache_salt)

    def _note_blocks(self, request: Request, states: list[int]) -> None:
        first = self._seen.get(request.request_id, 0)
        for index in range(first, len(request.block_hashes)):
            self._blocks.setdefault(bytes(request.block_hashes[index]), states[: (index + 1) * self._unit])
        self._seen[request.request_id] = len(request.block_hashes)

    def of_block(self, block_hash: bytes, tokens: int) -> Int64 | None:
        """States of the ``tokens`` tokens that end where this hash ends; None for a hash of no known request."""
        states = self._blocks.get(block_hash)
        return None if states is None else np.array(states[-tokens:], dtype=np.int64)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._seen.pop(request_id, None)
