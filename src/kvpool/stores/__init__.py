"""Pool backends behind one contract (base.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict, Unpack

from kvpool.stores.base import Store
from kvpool.stores.disk_settings import DiskSettings


class LocalOptions(TypedDict, total=False):
    """Options of ``local``; ``dram_bytes`` None joins a pool that is there."""

    root: str | Path | None
    name: str
    dram_bytes: int | None
    on_last_close: Literal["keep", "remove"]
    device: str
    disk: DiskSettings | None


def build_store(backend: str, *, fault_plan_path: str | Path | None = None, **options: Unpack[LocalOptions]) -> Store:
    """A store of this kind, not yet opened. ValueError, in one line, for an unknown backend, option or device.

    ``local`` takes root, name, dram_bytes, on_last_close, device ("cpu" by default) and disk. With ``fault_plan_path`` the store is
    wrapped by kvpool.stores.faulty, which does what that file says."""
    if backend != "local":
        raise ValueError(f"backend {backend!r} is unknown (accepted: local)")
    unknown = sorted(set(options) - set(LocalOptions.__annotations__))
    if unknown:
        raise ValueError(f"the local store has no option {unknown[0]!r} (accepted: {', '.join(LocalOptions.__annotations__)})")
    store: Store = make_local_store(**options)
    return store if fault_plan_path is None else with_faults(store, Path(fault_plan_path))


def make_local_store(
    root: str | Path | None = None,
    name: str = "default",
    dram_bytes: int | None = None,
    on_last_close: Literal["keep", "remove"] = "keep",
    device: str = "cpu",
    disk: DiskSettings | None = None,
) -> Store:
    """The embedded store; its libraries are imported here."""
    from kvpool.devices import copy_engine
    from kvpool.stores.local import LocalStore

    return LocalStore(None if root is None else Path(root), name, dram_bytes, on_last_close, copy_engine(device), disk)


def with_faults(store: Store, path: Path) -> Store:
    """``store``, misbehaving as the plan in the JSON file ``path`` says; the file may appear and change at any time."""
    from kvpool.stores.faults import FaultPlan
    from kvpool.stores.faulty import FaultyStore

    return FaultyStore(store, FaultPlan(path=path))


__all__ = ["DiskSettings", "Store", "build_store", "make_local_store", "with_faults"]
