"""How an arena is cut: chunks, slabs of whole chunks, slots of one size class inside a slab, and the units that number the
slots."""

from __future__ import annotations

from dataclasses import dataclass

GRANULE = 4096
MAX_CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """A pool of ``chunks`` chunks of ``chunk_bytes``. Slot i of the slab that begins at chunk c has unit ``c * units_per_chunk +
    i``: slots are never smaller than a granule, so no two slots that exist together share a unit."""

    chunk_bytes: int
    chunks: int

    @property
    def capacity(self) -> int:
        return self.chunk_bytes * self.chunks

    @property
    def units_per_chunk(self) -> int:
        return self.chunk_bytes // GRANULE

    @property
    def units(self) -> int:
        return self.chunks * self.units_per_chunk

    def slab_chunks(self, slot_bytes: int) -> int:
        """Chunks in a slab of this class: the fewest that waste at most an eighth, else those that waste least; 0: it cannot
        fit."""
        least = -(-slot_bytes // self.chunk_bytes)
        if least > self.chunks:
            return 0
        best, best_waste = least, 2.0
        for count in range(least, max(least, min(least * 8, self.chunks // 4)) + 1):
            waste = (count * self.chunk_bytes % slot_bytes) / (count * self.chunk_bytes)
            if waste < best_waste:
                best, best_waste = count, waste
            if waste <= 0.125:
                break
        return best

    def slots_per_slab(self, slot_bytes: int) -> int:
        return self.slab_chunks(slot_bytes) * self.chunk_bytes // slot_bytes


def slot_bytes_for(nbytes: int) -> int:
    """The size class of an object: its length rounded up to whole granules."""
    return -(-nbytes // GRANULE) * GRANULE


def geometry_for(dram_bytes: int) -> Geometry:
    """About 64 chunks or more, none above 64 MiB, so that classes can share small pools too. ValueError below one granule."""
    if dram_bytes < GRANULE:
        raise ValueError(f"dram_bytes is {dram_bytes}: a pool needs at least {GRANULE} bytes")
    power_of_two = (1 << (dram_bytes // 64).bit_length()) >> 1
    chunk = min(MAX_CHUNK, max(GRANULE, power_of_two))
    return Geometry(chunk, dram_bytes // chunk)
