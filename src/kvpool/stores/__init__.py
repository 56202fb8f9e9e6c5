"""Pool backends behind one contract (base.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict, TypeVar, Unpack

from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.stores.base import Store
from kvpool.stores.context import StoreContext
from kvpool.stores.disk_settings import DiskSettings

BACKENDS = ("local", "mooncake", "memcache", "yuanrong")


class LocalOptions(TypedDict, total=False):
    """Options of ``local``; ``dram_bytes`` None joins a pool that is there."""

    root: str | Path | None
    name: str
    dram_bytes: int | None
    on_last_close: Literal["keep", "remove"]
    device: str
    disk: DiskSettings | None


def build_store(
    backend: str,
    *,
    config: OptionModel | None = None,
    conf_path: str = "",
    context: StoreContext | None = None,
    fault_plan_path: str | Path | None = None,
    **options: Unpack[LocalOptions],
) -> Store:
    """A store of this kind, not yet opened. ValueError, in one line, for an unknown backend, option or device.

    ``local`` takes root, name, dram_bytes, on_last_close, device ("cpu" by default) and disk. The others take ``config``, what
    their configuration file says, ``conf_path``, where it lies, and ``context``. With ``fault_plan_path`` the store is wrapped by
    kvpool.stores.faulty, which does what that file says."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown (accepted: {', '.join(BACKENDS)})")
    unknown = sorted(set(options) - (set(LocalOptions.__annotations__) if backend == "local" else set()))
    if unknown:
        accepted = ", ".join(LocalOptions.__annotations__) if backend == "local" else "none"
        raise ValueError(f"the {backend} store has no option {unknown[0]!r} (accepted: {accepted})")
    if backend == "local":
        store = make_local_store(**options)
    else:
        store = _make_opaque_store(backend, config, conf_path, context or StoreContext())
    return store if fault_plan_path is None else with_faults(store, Path(fault_plan_path))


def _make_opaque_store(backend: str, config: OptionModel | None, conf_path: str, context: StoreContext) -> Store:
    """Only the adapter of ``backend`` is imported, and its library only when the store opens."""
    if backend == "mooncake":
        from kvpool.stores.mooncake import MooncakeStore

        return MooncakeStore(expect(config, MooncakeOptions, backend), context, load_deadline_s=context.load_deadline_s)
    if backend == "memcache":
        from kvpool.stores.memcache import MemcacheStore

        return MemcacheStore(expect(config, LocalConf, backend), context, conf_path)
    from kvpool.stores.yuanrong import YuanrongStore

    return YuanrongStore(expect(config, YuanrongOptions, backend), context)


M = TypeVar("M", bound=OptionModel)


def expect(config: OptionModel | None, kind: type[M], backend: str) -> M:
    if not isinstance(config, kind):
        raise ValueError(f"the {backend} store needs its configuration ({kind.__name__}), not {type(config).__name__}")
    return config


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
