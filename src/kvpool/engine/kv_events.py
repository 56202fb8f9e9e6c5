"""KV events: what this engine knows of blocks in the pool, told to whoever routes requests, in vLLM's own event types.

A block is *stored* once every rank has reported its object readable: stored now, stored by somebody before, or just loaded. It is
*removed* when a load or the sweep finds it gone, or a reset puts it out of reach. Each is told once, and nothing is told as removed
that was not told as stored. Memory is bounded: beyond ``MAX_TOLD`` blocks the longest known are no longer followed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.kv_offload.base import Locality

from kvpool.core.jobs import BlockName, Job, JobPart
from kvpool.engine.agreement import Space
from kvpool.engine.groups import pool_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MAX_TOLD = 1 << 17  # blocks followed until they are gone
MAX_PENDING = 1 << 16  # blocks in events that vLLM has not taken away yet
MAX_REMOVED = 1024  # hashes in one event


@dataclass(frozen=True)
class EventGroup:
    """What events say of one KV-cache group."""

    block_size: int
    units: int
    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Told:
    """A block that was told as stored; ``serial`` grows each time it is seen to be there."""

    serial: int
    space: Space


class KvEvents:
    """``note`` a job while its request is there, ``stored`` or ``drop`` it when it ends; ``take`` the events. One thread."""

    def __init__(self, groups: Sequence[EventGroup], local: bool) -> None:
        self._groups = groups
        self._medium = MEDIUM_CPU if local else MEDIUM_STORAGE
        self._locality = (Locality.LOCAL if local else Locality.REMOTE).value
        self._noted: dict[int, tuple[Space, dict[BlockName, BlockStored]]] = {}
        self._told: OrderedDict[BlockName, Told] = OrderedDict()
        self._pending: deque[BlockStored | BlockRemoved] = deque()
        self._size = 0  # blocks in ``_pending``
        self._serials = count(1)
        self._dropped = 0

    def note(self, job: Job, request: Request, space: Space) -> None:
        """A job begins: remember what to say of its blocks, for the request may be gone when it ends."""
        blocks: dict[BlockName, BlockStored] = {}
        for part in job.parts:
            blocks.update(self._describe(part, request))
        self._noted[job.job_id] = (space, blocks)

    def _describe(self, part: JobPart, request: Request) -> dict[BlockName, BlockStored]:
        group, hashes, lora = self._groups[part.group], request.block_hashes, request.lora_request
        found: dict[BlockName, BlockStored] = {}
        plain = lora is None and not request.mm_features and request.cache_salt is None and request.prompt_embeds is None
        extra, image = None, 0
        last: tuple[int, ExternalBlockHash | None] = (-1, None)  # the block before, for it is often the parent
        for index, name in zip(part.indexes, part.hashes, strict=True):
            start, end = index * group.block_size, (index + 1) * group.block_size
            if not plain:
                extra, image = generate_block_hash_extra_keys(request, start, end, image)
            # The prefix's own last block, whether or not it was stored by the same job, or at all.
            parent = last[1] if last[0] == index - 1 else maybe_convert_block_hash(hashes[index * group.units - 1])
            last = (index, maybe_convert_block_hash(name))
            found[part.group, name] = BlockStored(
                block_hashes=[last[1]],
                parent_block_hash=parent,
                token_ids=list(request.all_token_ids[start:end]),
                block_size=group.block_size,
                lora_id=lora.adapter_id if lora is not None else None,
                medium=self._medium,
                lora_name=lora.name if lora is not None else None,
                extra_keys=to_event_extra_keys([extra]),
                group_idx=part.group,
                kv_cache_spec_kind=group.kind,
                kv_cache_spec_sliding_window=group.window,
                locality=self._locality,
                session_id=request.session_id,
            )
        return found

    def stored(self, job_id: int, but: Iterable[BlockName] = ()) -> None:
        """All ranks have ended the job, and its blocks are readable, but for those named."""
        space, blocks = self._noted.pop(job_id, (None, {}))
        if space is None:
            return
        failed = set(but)
        for name, event in blocks.items():
            if name in failed:
                continue
            known = self._told.pop(name, None)
            self._told[name] = Told(next(self._serials), space)
            if known is None:
                self._push(event)
        while len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)

    def drop(self, job_id: int) -> None:
        """The job came to nothing that anybody should hear of."""
        self._noted.pop(job_id, None)

    def removed(self, names: Iterable[BlockName]) -> None:
        """These are not in the pool, or out of reach."""
        by_group: dict[int, list[bytes]] = {}
        for name in names:
            if self._told.pop(name, None) is not None:
                by_group.setdefault(name[0], []).append(name[1])
        for group, hashes in by_group.items():
            for first in range(0, len(hashes), MAX_REMOVED):
                converted = [maybe_convert_block_hash(h) for h in hashes[first : first + MAX_REMOVED]]
                self._push(BlockRemoved(converted, self._medium, group, self._locality))

    def forget_all(self) -> None:
        """After a reset of the pool: nothing told before can be reached any more."""
        self._noted.clear()
        self.removed(list(self._told))

    def cleared(self) -> None:
        """vLLM has told that all blocks of this engine are cleared. What the pool holds is told again when it is next seen."""
        self._told.clear()
        self._pending.clear()
        self._size = 0

    def oldest(self, limit: int) -> list[tuple[BlockName, Told]]:
        """The blocks that nobody has looked at for longest; they go to the end of the line."""
        chosen = list(islice(self._told, limit))
        for name in chosen:
            self._told.move_to_end(name)
        return [(name, self._told[name]) for name in chosen]

    def gone(self, missed: Iterable[tuple[BlockName, Told]]) -> None:
        """A look has missed these. What was stored again since counts as there."""
        self.removed([name for name, told in missed if self._told.get(name) == told])

    def _push(self, event: BlockStored | BlockRemoved) -> None:
        self._pending.append(event)
        self._size += len(event.block_hashes)
        while self._size > MAX_PENDING:
            lost = len(self._pending.popleft().block_hashes)
            self._size -= lost
            self._dropped += lost

    def take(self) -> list[BlockStored | BlockRemoved]:
        """The events since the last call, in the order in which they came true."""
        taken = list(self._pending)
        self._pending.clear()
        self._size = 0
        return taken

    def take_dropped(self) -> int:
        """Blocks in events that nobody took away in time, since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def open_jobs(self) -> int:
        return len(self._noted)


def kv_events_for(vllm_config: VllmConfig, kv_config: KVCacheConfig, local: bool) -> KvEvents | None:
    """None where nobody has asked vLLM for KV events. ``local``: the store reaches only this host."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    groups = []
    for pooled, group in zip(pool_groups(kv_config), kv_config.kv_cache_groups, strict=True):
        spec = group.kv_cache_spec
        kind, window = get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)
        groups.append(EventGroup(pooled.block_size, pooled.units, kind, window))
    return KvEvents(groups, local)
