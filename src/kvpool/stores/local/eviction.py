"""Who has to go: least recently used objects of a class, or a whole slab of another class. Runs inside the writer's
transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.local.arena import FREE_STAMP, Stamps
from kvpool.stores.local.clients import Peers
from kvpool.stores.local.fence import Fence
from kvpool.stores.local.ghosts import Ghosts
from kvpool.stores.local.records import Records
from kvpool.stores.local.slabs import Slab

Units = NDArray[np.int64]
Evicted = list[tuple[bytes, tuple[int, int, int, int]]]  # keys and what their entries were


@dataclass(slots=True)
class Evictor:
    """Removes objects from the index; their slots go to limbo and become free in a later transaction (``sweep``), when a fence
    and a look at every living client's stamps have shown that nobody reads them."""

    stamps: Stamps
    peers: Peers
    fence: Fence
    ghosts: Ghosts
    expendable: Callable[[Units], NDArray[np.bool_]] | None = None  # set: only these may go
    on_evicted: Callable[[Records, Evicted], None] | None = None  # told of each block, inside the transaction

    def held(self, units: Units) -> NDArray[np.bool_]:
        """Which slots somebody leases or pins now, as far as the clients of the last ``refresh`` go. Removed when that says too
        little."""
        self.peers.check()
        return self.peers.stamps(units) > time.monotonic_ns()

    def kept(self, units: Units) -> NDArray[np.bool_]:
        """Which slots must not be evicted now: those that are held, and where only some may go, the others that hold objects."""
        kept = self.held(units)
        if self.expendable is not None:
            kept |= ~self.expendable(units) & (self.stamps.values[units] != FREE_STAMP)
        return kept

    def sweep(self, records: Records) -> int:
        """Settle what lies in limbo: held slots stay, or come back if they were evicted and not removed; how many became free."""
        waiting = list(records.limbo())
        if not waiting:
            return 0
        self.fence()
        self.peers.refresh()
        if self.peers.removed():
            return 0
        held = self.held(np.array([unit for unit, _ in waiting], dtype=np.int64))
        freed = 0
        for (unit, limbo), busy in zip(waiting, held.tolist(), strict=True):
            if not busy:
                records.settle(unit)
                freed += 1
            elif limbo.revivable:
                records.revive(unit, limbo)
        free = [unit for (unit, _), busy in zip(waiting, held.tolist(), strict=True) if not busy]
        self.stamps.values[free] = FREE_STAMP
        return freed

    def reclaim(self, records: Records) -> int:
        """Free the slots that dead clients had reserved."""
        if self.peers.removed():
            return 0
        dead: dict[int, bool] = {}
        orphans = []
        for unit, reserved in records.reservations():
            if reserved.owner not in dead:
                dead[reserved.owner] = not self.peers.alive(reserved.owner)
            if dead[reserved.owner]:
                orphans.append((unit, reserved))
        for unit, reserved in orphans:
            records.cancel(unit, reserved)
        return len(orphans)

    def coldest(self, units: Units, count: int) -> Units:
        """The ``count`` least recently used of some units, coldest first."""
        ages = self.stamps.values[units]
        if count < len(units):
            chosen = np.argpartition(ages, count)[:count]
            units, ages = units[chosen], ages[chosen]
        return units[np.argsort(ages, kind="stable")]

    def evict(self, records: Records, slot_bytes: int, count: int) -> int:
        """Evict whole blocks (every shard) until ``count`` objects of a class are gone, coldest first; how many went."""
        units = records.slabs.units(records.slabs.of_class(slot_bytes))
        look, gone, done = count * 2 + 32, 0, 0
        while gone < count and done < len(units):
            look = min(look, len(units))
            candidates = self.coldest(units, look)[done:]
            gone += self._evict_blocks(records, candidates, count - gone, slot_bytes)
            done, look = look, look * 16 if done == 0 else len(units)
        return gone

    def _evict_blocks(self, records: Records, candidates: Units, count: int, slot_bytes: int) -> int:
        gone = 0
        held = self.kept(candidates)
        for unit, busy in zip(candidates.tolist(), held.tolist(), strict=True):
            if gone >= count:
                break
            key = None if busy else records.key_of(unit)
            if key is not None:
                gone += self._evict_block(records, key, slot_bytes)
        return gone

    def _evict_block(self, records: Records, key: bytes, slot_bytes: int) -> int:
        """Evict all shards of a block, or none when one of them is held; how many slots of the class that gives."""
        shards = [(shard, entry) for shard in records.shards_of(key) if (entry := records.entry(shard)) is not None]
        if len(shards) > 1 and self.kept(np.array([entry[0] for _, entry in shards], dtype=np.int64)).any():
            return 0
        gone = 0
        for shard, (unit, _, nbytes, generation) in shards:
            records.retract(shard, unit, nbytes, generation, revivable=True)
            self.ghosts.add(shard)
            gone += records.slabs.of_unit(unit).slot_bytes == slot_bytes
        records.add(b"evicted", len(shards))
        if (tell := self.on_evicted) is not None:  # another thread may end it
            tell(records, shards)
        return gone

    def empty(self, records: Records, slab: Slab) -> bool:
        """Evict what is not held from a slab; True when nothing readable is left in it."""
        first = records.slabs.first_unit(slab)
        units = np.array(records.units_between("ready", first, first + slab.slots), dtype=np.int64)
        held = self.held(units)
        left = 0
        for unit, busy in zip(units.tolist(), held.tolist(), strict=True):
            key = None if busy else records.key_of(unit)
            if key is not None:
                self._evict_block(records, key, slab.slot_bytes)
            left += records.key_of(unit) is not None
        return left == 0

    def ages(self, records: Records, slabs: list[Slab]) -> dict[int, int]:
        """How recently each slab (by first chunk) was used: the median of its slots' stamps; free slots count as never used.

        The median, not the newest: one hot object in every slab must not let a class keep all its cold ones for ever.
        """
        ages: dict[int, int] = {}
        for slots in {slab.slots for slab in slabs}:
            alike = [slab for slab in slabs if slab.slots == slots]
            first = np.array([records.slabs.first_unit(slab) for slab in alike], dtype=np.int64)
            values = self.stamps.values[first[:, None] + np.arange(slots, dtype=np.int64)]
            values[values == FREE_STAMP] = 0
            ages.update(zip([slab.chunk for slab in alike], np.median(values, axis=1).astype(np.int64).tolist(), strict=True))
        return ages
