"""The store behind Mooncake: a master keeps the index, clients give the memory, the engine moves bytes between them."""

from kvpool.stores.mooncake.store import MooncakeStore

__all__ = ["MooncakeStore"]
