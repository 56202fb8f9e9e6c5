"""The library memcache_hybrid: imported at first use, checked, and described for the type checker."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Protocol

INSTALL = "pip install memfabric-hybrid memcache-hybrid, in this order"
OLDEST_WITH_SSD = (1, 2, 0)
RANGED_CALLS = ("batch_alloc", "batch_copy_layers", "batch_write_finish", "batch_add_lease", "batch_remove_lease")


class KeyInfo(Protocol):
    """Where the copies of an object lie; empty lists where there is none."""

    def size(self) -> int: ...

    def type_list(self) -> list[int]: ...

    def gva_list(self) -> list[int]: ...


class Client(Protocol):
    """The calls that are used. Lists have one entry per key; codes are 0 for success."""

    def init(self, device_id: int, init_bm: bool = True) -> int: ...

    def close(self) -> int: ...

    def register_buffer(self, address: int, nbytes: int) -> int: ...

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]: ...

    def batch_get_key_info(self, keys: Sequence[str], flag: int = 0) -> list[KeyInfo]: ...

    def batch_put_from_layers(
        self, keys: Sequence[str], buffer_ptrs: list[list[int]], sizes: list[list[int]], direct: int
    ) -> list[int]: ...

    def batch_get_into_layers(
        self, keys: Sequence[str], buffer_ptrs: list[list[int]], sizes: list[list[int]], direct: int
    ) -> list[int]: ...

    def remove_batch(self, keys: Sequence[str]) -> list[int]: ...

    def batch_alloc(self, keys: Sequence[str], sizes: Sequence[int], media: int = 1, leaseTtlMs: int = 0) -> list[int]: ...

    def batch_copy_layers(self, gva_ptrs: list[int], buffer_ptrs: list[list[int]], sizes: list[list[int]], direct: int) -> int: ...

    def batch_write_finish(self, keys: Sequence[str], res: Sequence[int]) -> list[int]: ...

    def batch_add_lease(self, keys: Sequence[str], leaseTtlMs: int = 0) -> list[int]: ...

    def batch_remove_lease(self, keys: Sequence[str]) -> int: ...


def load(ssd: bool) -> ModuleType:
    """The module; OSError with what to install where it is missing, too old for SSD, or cannot be loaded."""
    try:
        found = version("memcache-hybrid")
    except PackageNotFoundError:
        raise OSError(f"the memcache backend needs the package memcache-hybrid: {INSTALL}") from None
    if ssd and _numbers(found) < OLDEST_WITH_SSD:
        raise OSError(f"memcache-hybrid {found} has no SSD tier: install 1.2.0 or newer, or set storage.enabled = false")
    try:
        return importlib.import_module("memcache_hybrid")
    except (ImportError, OSError) as error:
        hint = "LD_LIBRARY_PATH must name the libraries of the Ascend driver and of CANN"
        raise OSError(f"memcache-hybrid {found} is installed but does not load: {error} ({hint})") from None


def _numbers(text: str) -> tuple[int, ...]:
    """1.2.0.rc1 -> (1, 2, 0)."""
    numbers = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)
