"""MemCache: a pool of several hosts behind the library memcache_hybrid."""

from __future__ import annotations

from kvpool.stores.memcache.store import MemcacheStore

__all__ = ["MemcacheStore"]
