"""HeteroClient: objects written from and read into NPU memory. Built after the guides; not run, for want of an NPU.

Metadata (lookups, removal) is handled in the client process like that of KVClient, with remote H2D off. Transfers are not: device
memory belongs to the engine's process, so the library runs in it, and a call that waits for a worker makes the whole process wait,
up to the request timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvpool.devices import Device, device_of
from kvpool.stores.base import Batch, Result, Status, Tier
from kvpool.stores.yuanrong import library
from kvpool.stores.yuanrong.client_kv import found_of
from kvpool.stores.yuanrong.keys import names_of
from kvpool.stores.yuanrong.library import Native
from kvpool.stores.yuanrong.messages import Buffer, Settings

logger = logging.getLogger(__name__)


class HeteroMetadata:
    """What the client process needs to know of objects that NPU processes store. Not thread-safe."""

    def __init__(self, module: Native, settings: Settings) -> None:
        kind = module.HeteroClient
        arguments = library.connect_arguments(kind, settings.connect_ms, settings.request_ms, settings.exclusive)
        self._client = kind(settings.host, settings.port, **arguments)
        self._client.init()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return found_of(self._client, names)

    def create(self, names: Sequence[str], nbytes: int) -> list[Buffer | None]:
        raise RuntimeError("code: [Invalid parameter], msg: this client only looks up and removes")

    def publish(self, buffers: Sequence[int]) -> None:
        self.create([], 0)

    def open(self, names: Sequence[str], wait_ms: int) -> list[Buffer | None]:
        return self.create(names, wait_ms)

    def drop(self, buffers: Sequence[int]) -> None:
        return

    def delete(self, names: Sequence[str]) -> list[str]:
        return list(self._client.delete(list(names)))

    def close(self) -> None:
        del self._client


class HeteroTransfers:
    """Puts and gets of NPU memory, in this process. Thread-safe as far as the library is."""

    def __init__(self, module: Native, settings: Settings, device_id: int, wait_ms: int, remote_h2d: bool) -> None:
        self._module = module
        self._device_id = device_id
        self._wait_ms = wait_ms
        self._client = self._connect(settings, remote_h2d)
        self._device = _npu() if hasattr(self._client, "mset_d2h_from_multi_buffers") else None

    def _connect(self, settings: Settings, remote_h2d: bool) -> Native:
        kind = self._module.HeteroClient
        arguments = library.connect_arguments(kind, settings.connect_ms, settings.request_ms, settings.exclusive)
        for remote in (True, False) if remote_h2d else (False,):
            client = kind(settings.host, settings.port, enable_remote_h2d=remote, **arguments)
            try:
                client.init()
            except RuntimeError as error:
                if not remote:
                    raise
                logger.warning("kvpool: enable_remote_h2d is off, its checks failed: %s", error)
            else:
                return client
        raise AssertionError("unreachable")

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Register device memory in advance, where the version can."""
        call = getattr(self._client, "pre_register_device_memory", None)
        if call is not None:
            call([address for address, _ in regions], [nbytes for _, nbytes in regions])

    def put(self, batch: Batch) -> list[Result]:
        """All or none: the library does not tell which keys failed."""
        names, settings = names_of(batch.keys), self._module.kv_client.SetParam()
        settings.write_mode = self._module.WriteMode.NONE_L2_CACHE_EVICT
        if self._device is not None:
            self._device.bind_thread()
            self._client.mset_d2h_from_multi_buffers(names, *_lists(batch), settings)
        else:
            self._client.mset_d2h(names, self._blobs(batch), settings)
        return [Result(Status.OK, batch.object_nbytes, tier=Tier.REMOTE)] * len(names)

    def get(self, batch: Batch) -> list[Result]:
        names = names_of(batch.keys)
        if self._device is not None:
            self._device.bind_thread()
            failed = set(self._client.mget_h2d_from_multi_buffers(names, *_lists(batch), self._wait_ms))
        else:
            failed = set(self._client.mget_h2d(names, self._blobs(batch), self._wait_ms))
        good = Result(Status.OK, batch.object_nbytes, tier=Tier.REMOTE)
        return [Result(Status.MISSING) if name in failed else good for name in names]

    def close(self) -> None:
        del self._client

    def _blobs(self, batch: Batch) -> list[Native]:
        """One list of blobs per object: an address and a length per segment. The index says which device they are of, so that no
        thread needs to have it as its current one."""
        blob, blobs, sizes = self._module.Blob, self._module.DeviceBlobList, batch.sizes.tolist()
        return [
            blobs(self._device_id, [blob(address, nbytes) for address, nbytes in zip(row, sizes, strict=True)])
            for row in batch.addresses.tolist()
        ]


def _npu() -> Device | None:
    """For the calls that take the thread's current device; None while kvpool cannot set one: blobs name theirs."""
    try:
        return device_of("npu")
    except ValueError:
        return None


def _lists(batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths, a list per object."""
    return batch.addresses.tolist(), [batch.sizes.tolist()] * len(batch.keys)
