"""What tells engines apart whose block hashes differ: algorithm and seed."""

from __future__ import annotations

from collections.abc import Callable

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens

PROBE_TOKENS = tuple(range(1, 17))


def hash_probe(algorithm: str) -> Callable[[], str]:
    """The algorithm's name and the hash of a fixed token list: differs where PYTHONHASHSEED does. Called once the engine is up."""

    def probe() -> str:
        digest = hash_block_tokens(get_hash_fn_by_name(algorithm), None, PROBE_TOKENS)
        return f"{algorithm}:{digest.hex()[:16]}"

    return probe
