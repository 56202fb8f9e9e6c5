"""What may be known about the engine that an option is meant for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvpool.options.probe import HOST, Device, Probe

Hardware = Literal["A2", "A3", "A5"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Facts about the engine. None means unknown: a rule that needs the fact is then not applied.

    ``mla`` is True for MLA, SFA and DSA attention; ``index_topk`` is 0 for a model without a sparse indexer;
    ``hash_algo`` is vLLM's ``prefix_caching_hash_algo``; ``model_runner`` is 1 or 2.
    ``device`` is where the KV lies, ``hardware`` the series of an NPU; ``local_ranks`` are the ranks on this host, ``hosts`` is how
    many hosts share the pool. ``host`` looks at this host.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    pcp: int | None = None
    dcp: int | None = None
    eager: bool | None = None
    model_type: str | None = None
    num_layers: int | None = None
    mla: bool | None = None
    hybrid: bool | None = None
    block_size: int | None = None
    index_topk: int | None = None
    compressed_kv: bool | None = None
    kv_dtype: str | None = None
    model_runner: int | None = None
    hash_algo: str | None = None
    device: Device | None = None
    hardware: Hardware | None = None
    local_ranks: int | None = None
    hosts: int | None = None
    host: Probe = field(default=HOST, compare=False, repr=False)

    @property
    def context_parallel(self) -> bool:
        """True where context parallelism is known to be used."""
        return (self.pcp or 1) > 1 or (self.dcp or 1) > 1

    @property
    def ranks(self) -> int:
        """How many ranks share the pool of one engine group, as far as known."""
        return (self.tp or 1) * (self.pp or 1) * (self.dp or 1)

    @property
    def ranks_here(self) -> int:
        """How many of them share what this host has; all of them where that is not known."""
        return self.ranks if self.local_ranks is None else self.local_ranks


UNKNOWN = Deployment()
"""Nothing is known."""
