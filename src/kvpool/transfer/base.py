"""Transfer engines: who moves bytes from the memory of one process (prefill) into that of another (decode).

Two kinds. A *one-sided* engine reads the other's memory directly; the other need not do anything but keep it unchanged. A
*staged* engine has prefill copy what decode will need to a place that both reach, under names bound to the transfer; decode
fetches it there.

Rules for both: any thread may call anything between ``open`` and ``close``; errors travel in results, with the engine's own code
and text; nothing is written to targets after a call has returned; who reads must ask afterwards whether the source was held all
the time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.devices.process_memory import parts
from kvpool.stores.base import Batch, Result, Status

Int64 = NDArray[np.int64]
OVERDUE = Result(Status.TRANSIENT, text="the deadline passed before all bytes were read")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``one_host``: reaches only processes of this host."""

    one_host: bool = False


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs to be read: ``sizes[i]`` bytes from ``sources[i]`` in the peer to ``targets[i]`` here (1-D, same length)."""

    sources: Int64
    targets: Int64
    sizes: Int64

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


class TransferEngine(ABC):
    """What both kinds share. ``open`` and ``close`` are a pair."""

    name: str
    capabilities = Capabilities()

    @abstractmethod
    def open(self, regions: Sequence[tuple[int, int]]) -> None:
        """Start, for KV memory that lies in ``regions`` (address, nbytes). OSError or ValueError with the reason in one line.
        Libraries are imported here, not before."""

    @abstractmethod
    def address(self) -> bytes:
        """What a peer must know to reach this process; travels in signed messages only."""

    @abstractmethod
    def reach(self, address: bytes) -> str:
        """Try the peer: why it cannot be reached, in one line; "" when it has been."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class OneSidedEngine(TransferEngine):
    """Reads the peer's memory where it lies, call by call."""

    call_bytes: int  # between two looks at the clock

    def read(self, address: bytes, runs: Runs, deadline_s: float) -> Result:
        """Copy the runs. OK only when every byte has arrived; TRANSIENT over the deadline, FATAL where the peer cannot be read."""
        end = time.monotonic() + deadline_s
        for part in parts(runs.sizes, self.call_bytes):
            if time.monotonic() > end:
                return OVERDUE
            result = self._fetch(address, Runs(runs.sources[part], runs.targets[part], runs.sizes[part]))
            if result.status is not Status.OK:
                return result
        return Result(Status.OK, runs.nbytes)

    @abstractmethod
    def _fetch(self, address: bytes, runs: Runs) -> Result:
        """At most ``call_bytes`` (but for a single run) and as many runs as one call takes."""


class StagedEngine(TransferEngine):
    """Copies in two steps. A batch is as in a store: one object per key, made of segments. What is published stays until it is
    withdrawn or its time is up: other transfers never push it out."""

    @abstractmethod
    def publish(self, transfer_id: str, batch: Batch, deadline_s: float) -> Result:
        """Copy objects to where the peer finds them: OK, NO_SPACE where that would push out others, or what went wrong with the
        first that was not copied. Nothing of the batch is left there unless it is OK."""

    @abstractmethod
    def fetch(self, batch: Batch, deadline_s: float) -> Result:
        """Copy objects from there. OK only when every byte has arrived."""

    @abstractmethod
    def withdraw(self, transfer_id: str) -> None:
        """Nobody will fetch what this process has published of it. Idempotent."""
