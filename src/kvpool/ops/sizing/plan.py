"""What an operator knows or intends, from which everything else follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool.options.ascend_store import BackendName
from kvpool.options.errors import OptionError
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_master import MasterFlags

NEEDS = {
    "ubsio_size": ("ubsio_memory",),
    "kv_memory": ("disk_size", "offload_buffer"),
    "max_num_seqs": ("topk_buffer",),
    "dram_per_dp": ("topk_buffer",),
}
"""What is of use only beside one of others."""
OF_STORE: dict[str, BackendName] = {
    **dict.fromkeys(("disk_size", "offload_buffer", "kv_memory", "fabric", "fabric_capacity"), "mooncake"),
    **dict.fromkeys(("ubsio_memory", "ubsio_size"), "memcache"),
    **dict.fromkeys(("shared_memory_mb", "huge_pages"), "yuanrong"),
}
GUIDE_BATCH = 16384  # --max-num-batched-tokens of the guide's scripts


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes, but for ``fabric_capacity``, ``ubsio_size`` and ``dram_per_dp`` in GB. None: not given; what needs it is left
    out or computed.

    ``backend``: the store; None: figures of all, and what only one of them would refuse is a warning.
    ``concurrency``: sequences at once, of all data-parallel engines together.
    ``ranks``: processes that give memory to the pool, on all ``nodes``; None: those of the engine, or one a node where
    ``separated``. ``dram_size``: what each of them gives (dram.size, global_segment_size). ``dies``: of one node.
    """

    tokens: int
    concurrency: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    block_size: int = 128
    kv_dtype: str = "auto"
    indexer_dtype: str = "fp8"
    # the pool
    backend: BackendName | None = None
    ranks: int | None = None
    nodes: int = 1
    dies: int | None = None
    separated: bool = False
    spare: int = 0
    pool_size: int | None = None
    dram_size: int | None = None
    world_size: int | None = None
    host_memory: int | None = None
    max_batched_tokens: int = GUIDE_BATCH
    eviction_high_watermark: float = MasterFlags.model_fields["eviction_high_watermark_ratio"].default
    eviction_ratio: float = MasterFlags.model_fields["eviction_ratio"].default
    # disk tiers
    disk_size: int | None = None
    offload_buffer: int | None = None
    local_buffer: int = MooncakeOptions.model_fields["local_buffer_size"].default
    kv_memory: int | None = None
    fabric: bool = False
    fabric_capacity: int | None = None
    ubsio_memory: int | None = None
    ubsio_size: int | None = None
    # openYuanrong
    shared_memory_mb: int | None = None
    huge_pages: int | None = None
    # offloading
    layerwise_buffers: int | None = None
    layerwise_independent: tuple[int, ...] | Literal["all"] = (0,)
    topk_buffer: int | None = None
    max_num_seqs: int | None = None
    dram_per_dp: int | None = None

    def check(self) -> None:
        """OptionError for what would be ignored."""
        for name, store in OF_STORE.items():
            if getattr(self, name) and not self.may_use(store):
                raise OptionError(_flag(name), getattr(self, name), f"is of {store}, but the store is {self.backend}")
        for name, others in NEEDS.items():
            if getattr(self, name) is not None and all(getattr(self, other) is None for other in others):
                raise OptionError(_flag(name), getattr(self, name), f"is of use only with {' or '.join(map(_flag, others))}")

    def may_use(self, backend: BackendName) -> bool:
        """Whether figures of this store are wanted."""
        return self.backend in (None, backend)

    @property
    def engine_ranks(self) -> int:
        """Processes of the engines."""
        return self.tp * self.pp * self.dp

    @property
    def givers(self) -> int:
        """Processes that give memory."""
        return self.ranks or (self.nodes if self.separated else self.engine_ranks)

    @property
    def givers_per_node(self) -> int:
        return -(-self.givers // self.nodes)

    @property
    def local_services(self) -> int:
        """Processes that join the pool, whether they give memory or not."""
        return self.givers + self.engine_ranks if self.separated else max(self.givers, self.engine_ranks)

    @property
    def blocks(self) -> int:
        """Blocks that hold ``concurrency`` sequences of ``tokens``: each ends in a block of its own."""
        return self.blocks_per_sequence * self.concurrency

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def sequences_per_engine(self) -> int:
        """Of one data-parallel engine."""
        return -(-self.concurrency // self.dp)

    @property
    def blocks_per_engine(self) -> int:
        return self.blocks_per_sequence * self.sequences_per_engine


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
