"""The embedded store under the harness: every part of an engine opens the pool by itself, as its processes do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.stores import build_store
from kvpool.stores.base import Batch, Hit, Status


class RealPool:
    """A view of a pool from outside. ``options`` make a connector open it; ``faults`` are a plan that all of them follow."""

    def __init__(self, folder: Path, dram_bytes: int = 8 << 20) -> None:
        self._plan = folder / "faults.json"
        self._plan.write_text("{}")
        self.options = {
            "local_pool_root": str(folder),
            "local_dram_size": dram_bytes,
            "fault_plan_path": str(self._plan),
        }
        self._store = build_store("local", root=folder, dram_bytes=dram_bytes)
        self._store.open()

    def faults(self, **calls: Any) -> None:
        abandonable = calls.pop("abandonable", None)
        plan: dict[str, Any] = {"calls": calls}
        if abandonable is not None:
            plan["abandonable"] = abandonable
        scratch = self._plan.with_suffix(".new")
        scratch.write_text(json.dumps(plan))
        scratch.rename(self._plan)

    @property
    def objects(self) -> dict[bytes, bytes]:
        """All that can be read now."""
        found = {}
        keys = [key for key in self._store.list() if b":note:" not in key]
        for key, answer in zip(keys, self._store.exists(keys), strict=True):
            if not isinstance(answer, Hit):
                continue
            data = np.zeros(answer.nbytes, dtype=np.uint8)
            handle = self._store.get(Batch([key], np.array([[data.ctypes.data]]), np.array([answer.nbytes])), 60.0)
            assert handle.wait(60.0)
            if handle.results()[0].status is Status.OK:
                found[key] = data.tobytes()
        return found

    def evict(self, keys: list[bytes]) -> None:
        self._store.remove(keys)

    @property
    def leased(self) -> range:
        return range(self._store.stats().leases)

    def used(self) -> tuple[int, int]:
        """Objects pinned, and being written."""
        stats = self._store.stats()
        return stats.pinned, stats.writing

    def users(self) -> int:
        """Users of the pool that live, each with a file and a lock of its own."""
        return self._store.users()

    def close(self) -> None:
        self._store.close()
