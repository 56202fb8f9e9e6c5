"""openYuanrong datasystem: objects in the shared memory of the workers of a cluster."""

from kvpool.stores.yuanrong.store import YuanrongStore

__all__ = ["YuanrongStore"]
