"""Objects read from the disk into memory: into slots of the pool where it has some, so that they are promoted; else into buffers.

The I/O threads never touch memory of the caller. What a thread still reads into when the caller's deadline passes is cleaned up by
that thread when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from kvpool.stores.base import Result, Status
from kvpool.stores.local.arena import COPIED, SEEN
from kvpool.stores.local.disk.files import Damaged
from kvpool.stores.local.disk.iopool import Busy, IoCall
from kvpool.stores.local.disk.record import Record
from kvpool.stores.local.geometry import slot_bytes_for
from kvpool.stores.local.index import ENTRY
from kvpool.stores.local.jobs import CancelStep, Grant, PublishStep, ReserveStep, Room
from kvpool.stores.local.leases import FOREVER
from kvpool.stores.local.records import Records
from kvpool.stores.local.writer import Again

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

OFF = Result(Status.TRANSIENT, text="the disk tier is switched off")
OVERDUE = Result(Status.TRANSIENT, text="the disk did not answer in time")
DAMAGED = Result(Status.MISSING, text="damaged on the disk: removed")
AGAIN = Result(Status.TRANSIENT, text="stored by somebody else just now")
_SLICE_S = 0.25


class PromoteStep(ReserveStep):
    """Reserve slots for objects that the disk holds: for them that is no reason to refuse.

    ``gently``: evict nothing for it that would be lost, only what the disk has too or will not get."""

    def __init__(self, tier: DiskTier, keys: Sequence[bytes], nbytes: int, *, gently: bool) -> None:
        super().__init__(tier.pool, keys, nbytes)
        self._tier = tier
        self._gently = gently

    def _on_disk(self) -> set[bytes]:
        return set()

    def __call__(self, records: Records) -> Grant | Again:
        evictor = self._tier.pool.evictor  # used by this thread only, which runs all steps
        evictor.expendable = self._expendable if self._gently else None
        try:
            return super().__call__(records)
        finally:
            evictor.expendable = None

    def _expendable(self, units: NDArray[np.int64]) -> NDArray[np.bool_]:
        stamps = self._tier.pool.stamps.values[units]
        expendable: NDArray[np.bool_] = (stamps & COPIED) != 0
        if self._tier.settings.admission == "second_sight":
            expendable |= (stamps & SEEN) == 0
        return expendable


@dataclass(slots=True)
class _Read:
    """One object under way. ``entry`` is that of its slot on the disk, held until the end; ``room`` is a reserved slot in memory,
    None for a buffer."""

    row: int
    key: bytes
    entry: tuple[int, int, int, int]
    address: int
    room: Room | None
    call: IoCall | None = None
    ended: bool = False
    published: bool = False

    @property
    def nbytes(self) -> int:
        return self.entry[2]


class Landing:
    """Reads what the disk has of ``keys``, all at once, and publishes it in memory: without ``buffers`` at any price, with them
    only where that pushes out nothing that would be lost. The reads run once it is made; ``finish`` waits for them.

    ``places`` says by row where the bytes are (address, nbytes) until ``end``; ``results`` says by row why they are not: MISSING,
    TRANSIENT, or AGAIN when memory has the object by now. Rows that found no memory are in ``left``. A row in none of them is not
    on the disk."""

    def __init__(self, tier: DiskTier, keys: Sequence[bytes], deadline: float, *, buffers: bool) -> None:
        self._tier = tier
        self._pool = tier.pool
        self._deadline = deadline
        self._buffers = buffers
        self._reads: list[_Read] = []
        self.places: dict[int, tuple[int, int]] = {}
        self.results: dict[int, Result] = {}
        self.left: list[int] = []
        found = tier.hold(keys, FOREVER)
        columns = (found.offsets.tolist(), found.nbytes.tolist(), found.generations.tolist())
        entries = zip(found.units, *columns, strict=True)
        held = list(zip(found.rows, entries, strict=True))
        try:
            self._find_memory(keys, held, buffers)
            self._submit()
        except BaseException:
            self.end()
            raise

    def finish(self) -> Landing:
        """Until all reads have ended, or the deadline; then the bytes are in their places."""
        try:
            self._wait()
            self._publish(self._until(self._buffers))
        except BaseException:
            self.end()
            raise
        return self

    def _find_memory(self, keys: Sequence[bytes], held: list[tuple[int, tuple[int, int, int, int]]], buffers: bool) -> None:
        """A slot or a buffer for each object; those that get none are let go."""
        sizes = {entry[2] for _, entry in held}
        for nbytes in sorted(sizes):
            part = [(row, entry) for row, entry in held if entry[2] == nbytes]
            rooms, results = self._reserve([keys[row] for row, _ in part], nbytes, buffers)
            for place, (row, entry) in enumerate(part):
                room = rooms.get(place)
                if room is None and results[place].status is Status.EXISTS:
                    self.results[row] = AGAIN
                elif room is not None:
                    self._reads.append(_Read(row, keys[row], entry, self._pool.arena.base + room.offset, room))
                    continue
                elif buffers and (address := self._tier.bounce.take(slot_bytes_for(nbytes))) is not None:
                    self._reads.append(_Read(row, keys[row], entry, address, None))
                    continue
                else:
                    self.left.append(row)
                self._tier.books.leases.drop([entry[0]], FOREVER)

    def _reserve(self, keys: list[bytes], nbytes: int, buffers: bool) -> tuple[dict[int, Room], list[Result]]:
        none: tuple[dict[int, Room], list[Result]] = {}, [Result(Status.NO_SPACE)] * len(keys)
        try:
            step = PromoteStep(self._tier, keys, nbytes, gently=buffers)
            grant = self._pool.writer.call(step, self._until(buffers))
        except Exception:  # noqa: BLE001 - then there is no slot
            return none
        try:
            self._pool.leases.hold([room.unit for room in grant.rooms], FOREVER)
        except OSError:
            self._pool.writer.cancel(CancelStep(grant.rooms))
            return none
        return {room.row: room for room in grant.rooms}, grant.results

    def _submit(self) -> None:
        for read in self._reads:
            unit, offset, nbytes, generation = read.entry
            place = Record(0, generation, unit, nbytes, 0, 0, 0, 0, 0, read.key)

            def work(place: Record = place, offset: int = offset, address: int = read.address) -> None:
                self._tier.files.read(place, offset, address)

            def orphaned(read: _Read = read) -> None:
                self._let_go([read])

            read.call = IoCall(work, orphaned)
        self._tier.io.submit([read.call for read in self._reads if read.call is not None])

    def _wait(self) -> None:
        """Until all have ended, the deadline, or the disk hangs; settle what each has come to."""
        sound: list[_Read] = []
        damaged: list[_Read] = []
        for read in self._reads:
            call = cast(IoCall, read.call)
            while not call.wait(min(_SLICE_S, self._deadline - time.monotonic())):
                if time.monotonic() >= self._deadline or not self._tier.usable:
                    break
            if not call.give_up():
                self.results[read.row] = OVERDUE
                continue
            read.ended = True
            if call.error is None:
                sound.append(read)
            else:
                damaged.append(read)
                self.results[read.row] = self._failure(call.error)
        self._reads = sound
        self._let_go(damaged)
        if sound:
            self._tier.switch.worked("read")
        self._quarantine([read for read in damaged if self.results[read.row] is DAMAGED])

    def _failure(self, error: BaseException) -> Result:
        if isinstance(error, Damaged):
            return DAMAGED
        if not isinstance(error, Busy):
            self._tier.failed("read", error)
        return Result(Status.TRANSIENT, code=getattr(error, "errno", None), text=f"the disk could not be read: {error}")

    def _quarantine(self, reads: list[_Read]) -> None:
        """Remove what is damaged; what was removed while it was read only seemed so."""
        there = self._tier.books.entries([read.key for read in reads])
        keys = [read.key for read, raw in zip(reads, there, strict=True) if raw == ENTRY.pack(*read.entry)]
        if keys:
            self._tier.count(b"corrupt", len(keys))
            self._tier.remove(keys)

    def _until(self, buffers: bool) -> float:
        """How long to wait for the index. Where it is not needed, only so long that there is time for the bytes."""
        now = time.monotonic()
        return now + (self._deadline - now) / 2 if buffers else self._deadline

    def _publish(self, until: float) -> None:
        """Promote what lies in slots. Where that fails the bytes are there all the same."""
        reads = [read for read in self._reads if read.room is not None]
        for read in self._reads:
            self.places[read.row] = read.address, read.nbytes
        if not reads:
            return
        rooms = [read.room for read in reads if read.room is not None]
        try:
            step = PublishStep(self._pool, rooms, [read.key for read in reads], wanted=lambda: self._still_there(reads))
            outcome = self._pool.writer.call(step, until)
        except Exception:  # noqa: BLE001 - the slots are still ours
            return
        for read, result in zip(reads, outcome, strict=True):
            read.published = True
            if result.status is not Status.OK:  # the slot is free again, and may be anybody's
                del self.places[read.row]
                self.results[read.row] = AGAIN
        promoted = [room.unit for room, result in zip(rooms, outcome, strict=True) if result.status is Status.OK]
        self._pool.stamps.mark(np.array(promoted, dtype=np.int64), COPIED | SEEN, True)

    def _still_there(self, reads: list[_Read]) -> list[bool]:
        """What was removed from the disk meanwhile must not come back through memory."""
        there = self._tier.books.entries([read.key for read in reads])
        return [raw == ENTRY.pack(*read.entry) for read, raw in zip(reads, there, strict=True)]

    def _let_go(self, reads: list[_Read]) -> None:
        """Give back the memory and the holds of some reads that have ended."""
        rooms = [read.room for read in reads if read.room is not None]
        self._tier.books.leases.drop([read.entry[0] for read in reads], FOREVER)
        self._pool.leases.drop([room.unit for room in rooms], FOREVER)
        for read in reads:
            if read.room is None:
                self._tier.bounce.give(read.address)
        unpublished = [read.room for read in reads if read.room is not None and not read.published]
        if unpublished:
            self._pool.writer.cancel(CancelStep(unpublished))

    def end(self) -> None:
        """The places are no longer valid. Idempotent."""
        reads, self._reads = self._reads, []
        self.places.clear()
        self._let_go([read for read in reads if read.ended or read.call is None or read.call.give_up()])
