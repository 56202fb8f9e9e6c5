"""Pins: device blocks that jobs read or write. The engine may not reuse them until every rank's store call has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class BlockPins:
    """Reference counts in vLLM's block pool, by job; ``room`` says how many more blocks saves may pin."""

    def __init__(self, pool: BlockPool, save_limit: int) -> None:
        self._pool = pool
        self._limit = save_limit
        self._jobs: dict[int, tuple[list[int], bool]] = {}
        self.saving = 0
        self.total = 0

    def room(self) -> int:
        return max(0, self._limit - self.saving)

    def pin(self, job_id: int, block_ids: Sequence[int], saving: bool) -> None:
        self._touch(block_ids)
        self._jobs[job_id] = (list(block_ids), saving)
        self.total += len(block_ids)
        self.saving += len(block_ids) if saving else 0

    def unpin(self, job_id: int) -> None:
        """Exactly once per pinned job; a job that pinned nothing is fine."""
        block_ids, saving = self._jobs.pop(job_id, ([], False))
        self.total -= len(block_ids)
        self.saving -= len(block_ids) if saving else 0
        self._free(block_ids)

    def alone_on(self, job_ids: Iterable[int]) -> bool:
        """Whether one of these jobs is all that keeps a block from being free."""
        jobs = (self._jobs.get(job_id, ([], False))[0] for job_id in job_ids)
        return any(self._pool.blocks[i].ref_cnt == 1 for block_ids in jobs for i in block_ids)

    def lifted(self, call: Callable[[], bool]) -> bool:
        """Run ``call`` as if nothing were pinned. It must not hand out blocks: it is for vLLM's own reset of its prefix cache,
        which only forgets hashes and refuses while any block is in use."""
        pinned = [i for block_ids, _ in self._jobs.values() for i in block_ids]
        self._free(pinned)
        try:
            return call()
        finally:
            self._touch(pinned)

    def _touch(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def _free(self, block_ids: Sequence[int]) -> None:
        # Tail blocks first: they are to be evicted before the heads.
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(block_ids)])
