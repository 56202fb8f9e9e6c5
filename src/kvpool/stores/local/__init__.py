"""The embedded store."""

from __future__ import annotations

from kvpool.stores.local.store import LocalStore

__all__ = ["LocalStore"]
