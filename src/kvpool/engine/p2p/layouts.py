"""A rank's KV memory as peers are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.engine.cache_layout import WorkerLayout, is_head_major
from kvpool.transfer.messages import PageLayout, RankLayout, SpanLayout

if TYPE_CHECKING:
    import torch


def rank_layout(layout: WorkerLayout, caches: Mapping[str, torch.Tensor], num_blocks: int, rank: int, address: bytes) -> RankLayout:
    """``address`` is the transfer engine's; spans stand in the order of ``layout.layouts``."""
    spans = []
    for one in layout.layouts:
        shard = one.shard
        single = shard.first_head == shard.last_head
        spans.append(
            SpanLayout(
                group=one.group,
                first_head=shard.first_head,
                last_head=shard.last_head,
                note=shard.note,
                replica=one.replica,
                replicas=one.replicas,
                head_major=all(single or is_head_major(caches[page.name], num_blocks) for page in one.pages),
                pages=tuple(PageLayout(page.layer, page.name, page.base, page.stride, page.nbytes) for page in one.pages),
            )
        )
    return RankLayout(rank, tuple(spans), address)
