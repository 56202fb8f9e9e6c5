"""One write transaction on the index. Every change of a slot's state is a method here, so that the accounting is in one place:

unused, free -> reserved -> ready -> limbo -> free          reserved -> free          limbo -> ready (it was leased after all)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvpool.stores.local.index import (
    ENTRY,
    FREE,
    LIMBO,
    NAMED_TABLES,
    RESERVED,
    SLAB,
    UNIT,
    WRITING,
    Environment,
    LmdbCursor,
    LmdbTransaction,
)
from kvpool.stores.local.slabs import Slab, SlabTable


class Reserved(NamedTuple):
    owner: int
    generation: int
    nbytes: int
    key: bytes


def _reserved(raw: bytes) -> Reserved:
    owner, generation, nbytes = RESERVED.unpack_from(raw)
    return Reserved(owner, generation, nbytes, bytes(raw[RESERVED.size :]))


class Limbo(NamedTuple):
    revivable: bool
    nbytes: int
    generation: int
    key: bytes


def tail_of(key: bytes) -> bytes:
    """The block hash of a key ``v1:namespace:group:shard:hash``; the whole key where there is no such form."""
    return key.rpartition(b":")[2] or key


def block_of(key: bytes) -> bytes:
    """The key without its shard: equal for all shards of one block."""
    head, _, tail = key.rpartition(b":")
    return head.rpartition(b":")[0] + b":" + tail if head else key


class Records:
    """``slabs`` is this process's copy of the slab table, brought up to date here."""

    def __init__(self, txn: LmdbTransaction, environment: Environment, slabs: SlabTable) -> None:
        self.txn = txn
        self.tables = environment.tables
        self.slabs = slabs
        self._get = txn.get
        self._put = txn.put
        self._delete = txn.delete
        self._objects = self.tables["objects"]
        self._counters: dict[bytes, int] = {}
        self._tails: LmdbCursor | None = None
        if slabs.version != (version := self.counter(b"layout")):
            slabs.load(version, ((UNIT.unpack(key)[0], SLAB.unpack(value)) for key, value in self._cursor("slabs")))

    def _cursor(self, table: str) -> LmdbCursor:
        return self.txn.cursor(self.tables[table])

    # counters

    def counter(self, name: bytes) -> int:
        value = self._counters.get(name)
        if value is None:
            raw = self._get(name, db=self.tables["meta"])
            value = UNIT.unpack(raw)[0] if raw is not None else 0
        return int(value)

    def set_counter(self, name: bytes, value: int) -> None:
        self._counters[name] = value

    def add(self, name: bytes, change: int) -> int:
        value = self.counter(name) + change
        self._counters[name] = value
        return value

    def has_memory(self, chunk: int, chunks: int) -> bool:
        """Was this part of the arena ever in a slab? Then it has its memory."""
        mask = ((1 << chunks) - 1) << chunk
        return self._memory() & mask == mask

    def _memory(self) -> int:
        return int.from_bytes(self._get(b"memory", db=self.tables["meta"]) or b"", "little")

    def flush(self) -> None:
        """Write the counters back; called once, before the commit."""
        for name, value in self._counters.items():
            self._put(name, UNIT.pack(value), db=self.tables["meta"])

    # lookups

    def entry(self, key: bytes) -> tuple[int, int, int, int] | None:
        raw = self._get(key, db=self._objects)
        return None if raw is None else ENTRY.unpack(raw)

    def key_of(self, unit: int) -> bytes | None:
        raw = self._get(UNIT.pack(unit), db=self.tables["ready"])
        return None if raw is None else bytes(raw)

    def reservation(self, unit: int) -> Reserved | None:
        raw = self._get(UNIT.pack(unit), db=self.tables["reserved"])
        return None if raw is None else _reserved(raw)

    def writer_of(self, key: bytes) -> tuple[int, int] | None:
        """Unit and owner of the reservation under way for a key."""
        raw = self._get(key, db=self.tables["writing"])
        return None if raw is None else WRITING.unpack(raw)

    def shards_of(self, key: bytes) -> list[bytes]:
        """The stored shards of the block of ``key``, itself included."""
        if self._tails is None:
            self._tails = self._cursor("tails")
        cursor = self._tails
        if not cursor.set_key(tail_of(key)) or cursor.count() == 1:
            return [key]
        block = block_of(key)
        return [bytes(other) for other in cursor.iternext_dup() if block_of(other) == block]

    def reservations(self) -> Iterator[tuple[int, Reserved]]:
        for raw, value in self._cursor("reserved"):
            yield UNIT.unpack(raw)[0], _reserved(value)

    def limbo(self) -> Iterator[tuple[int, Limbo]]:
        for raw, value in self._cursor("limbo"):
            revivable, nbytes, generation = LIMBO.unpack_from(value)
            yield UNIT.unpack(raw)[0], Limbo(bool(revivable), nbytes, generation, bytes(value[LIMBO.size :]))

    def in_limbo(self, unit: int) -> bool:
        return self._get(UNIT.pack(unit), db=self.tables["limbo"]) is not None

    def units_between(self, table: str, first: int, end: int) -> list[int]:
        """Units of ``first .. end`` that stand in a table keyed by unit."""
        cursor = self._cursor(table)
        found: list[int] = []
        if cursor.set_range(UNIT.pack(first)):
            for raw in cursor.iternext(keys=True, values=False):
                unit = UNIT.unpack(raw)[0]
                if unit >= end:
                    break
                found.append(unit)
        return found

    def count(self, table: str) -> int:
        entries = int(self.txn.stat(self.tables[table])["entries"])
        return entries - NAMED_TABLES if table == "objects" else entries

    # transitions

    def free_slots(self, slot_bytes: int, limit: int, first: int = 0) -> list[int]:
        """Up to ``limit`` free units of a class from ``first`` on, in order of place."""
        cursor = self._cursor("free")
        found: list[int] = []
        if limit > 0 and cursor.set_range(FREE.pack(slot_bytes, first)):
            for raw in cursor.iternext(keys=True, values=False):
                size, unit = FREE.unpack(raw)
                if size != slot_bytes:
                    break
                found.append(unit)
                if len(found) == limit:
                    break
        return found

    def unused_slots(self, slot_bytes: int) -> list[tuple[Slab, int]]:
        """Slabs of a class that still have slots never used, in the order in which they are to be used up, and how many slots."""
        raw = self._get(b"carve%d" % slot_bytes, db=self.tables["meta"]) or b""
        slabs = [self.slabs.at(UNIT.unpack_from(raw, place)[0]) for place in range(0, len(raw), UNIT.size)]
        mine = [slab for slab in slabs if slab is not None and slab.slot_bytes == slot_bytes and not slab.retiring]
        return [(slab, left) for slab in mine if (left := slab.slots - self.carved(slab))]

    def _set_unused(self, slot_bytes: int, slabs: list[Slab]) -> None:
        self._put(b"carve%d" % slot_bytes, b"".join(UNIT.pack(slab.chunk) for slab in slabs), db=self.tables["meta"])

    def carved(self, slab: Slab) -> int:
        """Slots of a slab ever used (the copy in ``slabs`` does not follow this number)."""
        return int(SLAB.unpack(self._get(UNIT.pack(slab.chunk), db=self.tables["slabs"]))[3])

    def take(self, slot_bytes: int, count: int) -> list[int]:
        """Take up to ``count`` units of a class out of the free ones; the caller reserves them in this transaction."""
        units = self.free_slots(slot_bytes, count)
        for unit in units:
            self._delete(FREE.pack(slot_bytes, unit), db=self.tables["free"])
        if len(units) < count:
            units.extend(self._carve(slot_bytes, count - len(units)))
        self.add(b"used", len(units) * slot_bytes)
        return units

    def _carve(self, slot_bytes: int, count: int) -> list[int]:
        """Up to ``count`` slots that were never used."""
        units: list[int] = []
        unused = self.unused_slots(slot_bytes)
        for slab, left in unused:
            fresh = min(left, count - len(units))
            first = self.slabs.first_unit(slab) + slab.slots - left
            units.extend(range(first, first + fresh))
            self._store_slab(slab, slab.slots - left + fresh)
            if len(units) == count:
                break
        self._set_unused(slot_bytes, [slab for slab, _ in unused if self.carved(slab) < slab.slots])
        return units

    def reserve(self, unit: int, owner: int, nbytes: int, key: bytes) -> int:
        """A taken unit becomes the owner's; the generation of the reservation."""
        generation = self.add(b"generation", 1)
        self._put(UNIT.pack(unit), RESERVED.pack(owner, generation, nbytes) + key, db=self.tables["reserved"])
        if key:
            self._put(key, WRITING.pack(unit, owner), db=self.tables["writing"])
        return generation

    def publish(self, unit: int, reserved: Reserved, key: bytes) -> None:
        """A reserved slot becomes a readable object; the key must be absent."""
        self._end_reservation(unit, reserved)
        self._make_ready(unit, key, reserved.nbytes, reserved.generation)

    def cancel(self, unit: int, reserved: Reserved) -> None:
        """A reserved slot becomes free: nobody but its owner ever reached it."""
        self._end_reservation(unit, reserved)
        self._free(unit)

    def retract(self, key: bytes, unit: int, nbytes: int, generation: int, *, revivable: bool) -> None:
        """A readable object is no longer found; its slot waits in limbo until nobody reads it."""
        raw = UNIT.pack(unit)
        self._delete(key, db=self._objects)
        self._delete(raw, db=self.tables["ready"])
        self._delete(tail_of(key), key, db=self.tables["tails"])
        self._put(raw, LIMBO.pack(revivable, nbytes, generation) + key, db=self.tables["limbo"])

    def settle(self, unit: int) -> None:
        """A slot in limbo that nobody reads becomes free."""
        self._delete(UNIT.pack(unit), db=self.tables["limbo"])
        self._free(unit)

    def revive(self, unit: int, limbo: Limbo) -> bool:
        """An evicted object that proved to be leased is found again, unless its key was stored anew."""
        if self.entry(limbo.key) is not None:
            return False
        self._delete(UNIT.pack(unit), db=self.tables["limbo"])
        self._make_ready(unit, limbo.key, limbo.nbytes, limbo.generation)
        return True

    def _make_ready(self, unit: int, key: bytes, nbytes: int, generation: int) -> None:
        self._put(key, ENTRY.pack(unit, self.slabs.offset(unit), nbytes, generation), db=self._objects)
        self._put(UNIT.pack(unit), key, db=self.tables["ready"])
        self._put(tail_of(key), key, db=self.tables["tails"])

    def _end_reservation(self, unit: int, reserved: Reserved) -> None:
        self._delete(UNIT.pack(unit), db=self.tables["reserved"])
        if reserved.key and (writing := self.writer_of(reserved.key)) is not None and writing[0] == unit:
            self._delete(reserved.key, db=self.tables["writing"])

    def _free(self, unit: int) -> None:
        slab = self.slabs.of_unit(unit)
        self.add(b"used", -slab.slot_bytes)
        if not slab.retiring:
            self._put(FREE.pack(slab.slot_bytes, unit), b"", db=self.tables["free"])

    def restore(self, unit: int, key: bytes, nbytes: int, generation: int) -> None:
        """A slot of a new index holds an object that outlived the old one; the key must be absent."""
        self.add(b"used", self.slabs.of_unit(unit).slot_bytes)
        self._make_ready(unit, key, nbytes, generation)

    # slabs

    def restore_slab(self, slab: Slab, carved: int, free: Iterable[int]) -> None:
        """A slab of a new index, of which so many slots were used and ``free`` of them hold nothing."""
        self.add_slab(slab.chunk, slab.chunks, slab.slot_bytes, slab.slots)
        self._store_slab(slab, carved)
        for unit in free:
            self._put(FREE.pack(slab.slot_bytes, unit), b"", db=self.tables["free"])

    def add_slab(self, chunk: int, chunks: int, slot_bytes: int, slots: int) -> None:
        slab = Slab(chunk, chunks, slot_bytes, slots, False)
        self._put_slab(slab, 0)
        self._set_unused(slot_bytes, [*(unused for unused, _ in self.unused_slots(slot_bytes) if unused != slab), slab])
        memory = self._memory() | ((1 << chunks) - 1) << chunk
        self._put(b"memory", memory.to_bytes(memory.bit_length() // 8 + 1, "little"), db=self.tables["meta"])

    def retire(self, slab: Slab) -> None:
        """No slot of the slab is given out any more."""
        first = self.slabs.first_unit(slab)
        for unit in self.free_slots(slab.slot_bytes, slab.slots, first):
            if unit < first + slab.slots:
                self._delete(FREE.pack(slab.slot_bytes, unit), db=self.tables["free"])
        self._put_slab(slab._replace(retiring=True), self.carved(slab))

    def drop_slab(self, slab: Slab) -> None:
        """The chunks of an empty retired slab are free."""
        self._delete(UNIT.pack(slab.chunk), db=self.tables["slabs"])
        self.slabs.remove(slab, self.add(b"layout", 1))

    def _put_slab(self, slab: Slab, carved: int) -> None:
        self._store_slab(slab, carved)
        self.slabs.insert(slab, self.add(b"layout", 1))

    def _store_slab(self, slab: Slab, carved: int) -> None:
        value = SLAB.pack(slab.chunks, slab.slot_bytes, slab.slots, carved, slab.retiring)
        self._put(UNIT.pack(slab.chunk), value, db=self.tables["slabs"])
