"""openYuanrong datasystem: objects in the shared memory of the workers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.stores.yuanrong.store import YuanrongStore

__all__ = ["YuanrongStore"]


def __getattr__(name: str) -> type[YuanrongStore]:
    """Imported at first use: the client process needs a few modules of this package only."""
    if name == "YuanrongStore":
        from kvpool.stores.yuanrong.store import YuanrongStore

        return YuanrongStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
