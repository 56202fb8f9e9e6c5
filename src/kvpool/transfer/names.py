"""Names of published objects: bound to a transfer's random id, so they say nothing of content and never meet a pool's keys."""

from __future__ import annotations

from collections.abc import Sequence


def object_keys(transfer_id: str, rank: int, span_index: int, blocks: Sequence[int]) -> list[bytes]:
    """Keys of the given blocks (by their place in the request) of one span of one prefill rank."""
    return [f"t1:{transfer_id}:{rank}:{span_index}:{block}".encode() for block in blocks]


def choice_of(transfer_id: str) -> int:
    """The number by which both sides choose among ranks that hold the same: spreads transfers over them."""
    return int(transfer_id[:8], 16)
