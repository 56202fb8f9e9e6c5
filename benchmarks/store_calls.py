"""The calls that the part `stores` compares: a store's own, and those of its library without kvpool, on the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.stores.base import Batch, Hit, Status, Store

DEADLINE_S = 30.0


class Calls(Protocol):
    """Whole batches; RuntimeError where a call did not do all of it."""

    def put(self, batch: Batch) -> None: ...

    def get(self, batch: Batch) -> None: ...

    def exists(self, keys: Sequence[bytes]) -> None:
        """Every key is there."""
        ...


class OurCalls:
    """Through the store. ``checksums``: whether objects get one; None leaves it to the store."""

    def __init__(self, store: Store, checksums: bool | None = None) -> None:
        self._store, self._checksums = store, checksums

    def put(self, batch: Batch) -> None:
        self._transfer(batch, self._store.put)

    def get(self, batch: Batch) -> None:
        self._transfer(batch, self._store.get)

    def _transfer(self, batch: Batch, call: Any) -> None:  # noqa: ANN401 - put or get
        usual = getattr(self._store, "checksums", None)
        if self._checksums is not None:
            self._store.checksums = self._checksums  # type: ignore[attr-defined]
        try:
            handle = call(batch, DEADLINE_S)
            _demand(handle.wait(DEADLINE_S), "the store did not end in time")
        finally:
            if self._checksums is not None:
                self._store.checksums = usual  # type: ignore[attr-defined]
        for result in handle.results():
            _demand(result.status is Status.OK, f"the store did not do all of it: {result}")

    def exists(self, keys: Sequence[bytes]) -> None:
        _demand(all(isinstance(answer, Hit) for answer in self._store.exists(keys)), "the store lost an object")


class MooncakeCalls:
    """MooncakeDistributedStore, the client that the store has set up."""

    def __init__(self, client: Any, config: object) -> None:  # noqa: ANN401 - of the library, which has no types
        self._client, self._config = client, config

    def put(self, batch: Batch) -> None:
        names, sizes = _names(batch.keys), [batch.sizes.tolist()] * len(batch.keys)
        codes = self._client.batch_put_from_multi_buffers(names, batch.addresses.tolist(), sizes, self._config)
        _demand(len(codes) == len(names) and min(codes) >= 0, f"put: {codes[:4]}")

    def get(self, batch: Batch) -> None:
        names, sizes = _names(batch.keys), [batch.sizes.tolist()] * len(batch.keys)
        codes = self._client.batch_get_into_multi_buffers(names, batch.addresses.tolist(), sizes)
        _demand(codes == [batch.object_nbytes] * len(names), f"get: {codes[:4]}")

    def exists(self, keys: Sequence[bytes]) -> None:
        _demand(self._client.batch_is_exist(_names(keys)) == [1] * len(keys), "an object was lost")


class MemcacheCalls:
    """DistributedObjectStore: a process has one, so it is the store's. Directions are those of memory of this host."""

    PUT, GET = 3, 2

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - of the library, which has no types
        self._client = client

    def put(self, batch: Batch) -> None:
        names, sizes = _names(batch.keys), [batch.sizes.tolist()] * len(batch.keys)
        codes = self._client.batch_put_from_layers(names, batch.addresses.tolist(), sizes, self.PUT)
        _demand(codes == [0] * len(names), f"put: {codes[:4]}")

    def get(self, batch: Batch) -> None:
        names, sizes = _names(batch.keys), [batch.sizes.tolist()] * len(batch.keys)
        codes = self._client.batch_get_into_layers(names, batch.addresses.tolist(), sizes, self.GET)
        _demand(codes == [0] * len(names), f"get: {codes[:4]}")

    def exists(self, keys: Sequence[bytes]) -> None:
        _demand(self._client.batch_is_exist(_names(keys)) == [1] * len(keys), "an object was lost")


class YuanrongCalls:
    """KVClient in this process, by its calls without a copy of its own: memory of the worker, which memmove fills or reads."""

    def __init__(self, address: str) -> None:
        from kvpool.stores.yuanrong import library

        module = library.load()
        host, _, port = address.rpartition(":")
        self._client = module.KVClient(host, int(port))
        self._client.init()
        self._mode = module.WriteMode.NONE_L2_CACHE_EVICT

    def put(self, batch: Batch) -> None:
        buffers = self._client.mcreate(_names(batch.keys), [batch.object_nbytes] * len(batch.keys), self._mode)
        for buffer, addresses in zip(buffers, batch.addresses.tolist(), strict=True):
            place = _address(buffer.MutableData())
            for address, nbytes in zip(addresses, batch.sizes.tolist(), strict=True):
                ctypes.memmove(place, address, nbytes)
                place += nbytes
        self._client.mset_buffer(buffers)

    def get(self, batch: Batch) -> None:
        buffers = self._client.get_read_only_buffers(_names(batch.keys), 0)
        for buffer, addresses in zip(buffers, batch.addresses.tolist(), strict=True):
            _demand(buffer is not None, "get: an object was lost")
            place = _address(buffer.immutable_data())
            for address, nbytes in zip(addresses, batch.sizes.tolist(), strict=True):
                ctypes.memmove(address, place, nbytes)
                place += nbytes

    def exists(self, keys: Sequence[bytes]) -> None:
        _demand(all(self._client.exist(_names(keys))), "an object was lost")


def native_calls(backend: str, store: Any, config: Any) -> Calls | None:  # noqa: ANN401 - of any store and its file
    """The library of an open store; None for ``local``, which has none."""
    if backend == "mooncake":
        return MooncakeCalls(store._client, store._placement(store._client))
    if backend == "memcache":
        return MemcacheCalls(store._client)
    if backend == "yuanrong":
        return YuanrongCalls(config.worker_addr)
    return None


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.decode() for key in keys]


def _address(view: object) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)  # type: ignore[call-overload]


def _demand(good: bool, otherwise: str) -> None:
    if not good:
        raise RuntimeError(otherwise)
