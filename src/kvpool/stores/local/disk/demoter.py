"""The thread that copies cold objects to the disk before they are evicted from memory, and drops cold ones from a full disk.

One process of the pool at a time does this: the one that holds the lock ``demoter``. When it dies another one takes over."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import lmdb

from kvpool.stores.local.clients import Removed
from kvpool.stores.local.disk.choose import Vacant, occupied, to_copy
from kvpool.stores.local.disk.demote import BATCH_S, Batch
from kvpool.stores.local.disk.erase import Eraser
from kvpool.stores.local.disk.trim import TrimStep
from kvpool.stores.local.writer import Closed, Overdue

if TYPE_CHECKING:
    from kvpool.stores.local.disk.tier import DiskTier

logger = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
_BATCH_SHARE = 32  # of the memory at once: what is being copied cannot be evicted meanwhile
_IDLE_S = 0.1
_SOON_S = 0.005  # after nothing could be copied of what was chosen: eviction is ahead, and the next objects are as urgent
_ELECT_S = 0.5
_META_S = 30.0


class Demoter:
    """Starts with ``start``: a process that only looks keys up copies nothing."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.elected = False
        self._meta_at = time.monotonic() + _META_S
        self._told = False
        self._begun = False  # the high watermark was passed, and the low one is not reached yet
        self._pause = _SOON_S
        self.eraser = Eraser(tier)
        self.vacant = Vacant()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def start(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self.stopping:
                    self._thread = threading.Thread(target=self._run, name="kvpool-demoter", daemon=True)
                    self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """False when it is still in the middle of something after ``timeout_s``."""
        with self._lock:
            self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        return True

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._tier.bounce.tidy()
                self.elected = self.elected or self._elect()
                pause = self._turn() if self.elected else _ELECT_S
                self._stop.wait(pause)
        finally:
            self._resign()

    def _elect(self) -> bool:
        try:
            if not self._tier.files.folder.elect():
                return False
        except OSError as error:
            self._tell(error)
            return False
        try:
            self.eraser.look_for_leftovers()
        except (OSError, lmdb.Error, Closed, Overdue) as error:
            self._tell(error)
        return True

    def _resign(self) -> None:
        if self.elected:
            self.save_meta()
            self._tier.files.folder.resign()
            self.elected = False

    def _turn(self) -> float:
        """One round; how long to pause after it."""
        tier = self._tier
        if tier.books.peers.removed() or tier.pool.peers.removed():
            self._tell(Removed())
            self._stop.set()
        if not tier.usable or self.stopping:
            return _IDLE_S
        try:
            if time.monotonic() >= self._meta_at:
                self.save_meta()
            tier.books.writer.call(TrimStep(tier.books, tier.settings.high, tier.settings.low), time.monotonic() + BATCH_S)
            self.eraser.run()
            memory = self.vacant.left_out(occupied(tier.pool))
            units = to_copy(memory, tier.settings, min(BATCH_BYTES, memory.capacity // _BATCH_SHARE), begun=self._begun)
            self._begun = len(units) > 0
            if not self._begun:
                return _IDLE_S
            copied = Batch(tier, units.tolist()).run()
            self.eraser.run()
            return self.pause_after(copied)
        except Closed:
            return _IDLE_S
        except Overdue as error:
            tier.switch.failed("write", error)
        except (OSError, lmdb.Error) as error:
            tier.failed("write", error)
        except Exception:  # the thread must live on
            if not self._told:
                logger.warning("a turn of the demoter failed", exc_info=True)
                self._told = True
        return _IDLE_S

    def pause_after(self, copied: int) -> float:
        """None after a batch that copied something; else longer each time, since the disk may be full."""
        if copied:
            self._pause = _SOON_S
            return 0.0
        pause, self._pause = self._pause, min(2 * self._pause, _IDLE_S)
        return pause

    def save_meta(self) -> None:
        """How much was written, for after a restart."""
        self._meta_at = time.monotonic() + _META_S
        try:
            meta = self._tier.files.folder.read_disk_meta()
            written = self._tier.books.look(lambda records: records.counter(b"written"))
            if meta is not None and meta.written_bytes != written:
                self._tier.files.folder.write_disk_meta(replace(meta, written_bytes=written))
        except (OSError, ValueError, lmdb.Error, Closed, Overdue) as error:
            self._tell(error)

    def _tell(self, error: object) -> None:
        if not self._told:
            logger.warning("the disk tier: %s", error)
            self._told = True
