"""Who holds which heads and layers: the arithmetic of tensor and pipeline parallelism. Results are plain ints."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class HeadSpan(NamedTuple):
    """KV heads ``first`` to ``last`` (inclusive) of one rank; replica ``replica`` of ``replicas`` ranks that hold the same."""

    first: int
    last: int
    replica: int
    replicas: int


def head_span(total_heads: int, tp_size: int, tp_rank: int) -> HeadSpan:
    """The KV heads of a tensor-parallel rank, as vLLM splits them: evenly, or replicated when there are fewer heads than ranks.

    ``total_heads`` is 1 for a latent (MLA) cache. ValueError where the sizes do not divide.
    """
    if total_heads < 1 or not 0 <= tp_rank < tp_size:
        raise ValueError(f"no KV heads for rank {tp_rank} of {tp_size} with {total_heads} heads")
    if total_heads >= tp_size:
        if total_heads % tp_size:
            raise ValueError(f"{total_heads} KV heads do not divide among {tp_size} ranks")
        each = total_heads // tp_size
        return HeadSpan(tp_rank * each, (tp_rank + 1) * each - 1, 0, 1)
    if tp_size % total_heads:
        raise ValueError(f"{tp_size} ranks do not divide among {total_heads} KV heads")
    replicas = tp_size // total_heads
    head = tp_rank // replicas
    return HeadSpan(head, head, tp_rank % replicas, replicas)


def saves_block(block_index: int, replica: int, replicas: int) -> bool:
    """Whether this replica stores a block: round robin by position, so every block is stored exactly once, whoever asks."""
    return block_index % replicas == replica


def layer_partition(num_layers: int, stages: int, explicit: str | None = None) -> list[range]:
    """Layers of each pipeline stage: ``explicit`` ("30,31") or vLLM's even split (61 layers in 2: 31, 30; 62 in 4: 15, 16, 16, 15).

    ValueError where the explicit split does not match.
    """
    if explicit is not None:
        try:
            sizes = [int(part) for part in explicit.split(",")]
        except ValueError:
            raise ValueError(f"layer partition {explicit!r}: expected integers like '30,31'") from None
        if len(sizes) != stages or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(f"layer partition {explicit!r}: expected {stages} positive numbers that sum to {num_layers}")
    else:
        base, extra = divmod(num_layers, stages)
        sizes = [base] * stages
        # The last stage also holds the final norm, so the remainder goes to the stages before it.
        for i in range(2, extra + 2):
            sizes[-i] += 1
    bounds = [sum(sizes[:i]) for i in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
