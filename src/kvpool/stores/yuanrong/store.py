"""The store contract on the openYuanrong datasystem."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from kvpool.options.reach import check_reach
from kvpool.options.scalars import split_address
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.stores.base import (
    MISS,
    Answer,
    Batch,
    Capabilities,
    Health,
    Hit,
    Reader,
    Result,
    Status,
    StoreStats,
    Tier,
    Writer,
)
from kvpool.stores.context import StoreContext
from kvpool.stores.native import Closed
from kvpool.stores.opaque import Limits, OpaqueStore
from kvpool.stores.yuanrong import library
from kvpool.stores.yuanrong.child import Child
from kvpool.stores.yuanrong.client_hetero import HeteroTransfers
from kvpool.stores.yuanrong.codes import LibraryError, brief, result_of
from kvpool.stores.yuanrong.ended import EndedReader, EndedWriter
from kvpool.stores.yuanrong.keys import MAX_NAME, PROBE, names_of
from kvpool.stores.yuanrong.link import Link
from kvpool.stores.yuanrong.messages import GREETING, Reply, Settings
from kvpool.stores.yuanrong.ranged import BeingWritten, PieceReader, PieceWriter
from kvpool.stores.yuanrong.transfers import HostTransfers

logger = logging.getLogger(__name__)

_START_S = 10.0  # to start a client process and import the library, beside the connect timeout
_LOOKUP_S = 2.0


class YuanrongStore(OpaqueStore):
    """Host memory goes through KVClient in client processes, one for lookups and one for transfers; NPU memory through HeteroClient
    in this process. Objects are evicted when room is needed, cannot be leased, and are gone with the worker that holds them.

    A ``scheduler`` only looks up, whatever ``use_layerwise`` says: the process for transfers starts with the first transfer."""

    name = "yuanrong"
    limits = Limits(batch_keys=256, batch_bytes=64 << 20, exists_keys=4096, lookup_s=_LOOKUP_S)

    def __init__(self, options: YuanrongOptions, context: StoreContext) -> None:
        super().__init__()
        self._options = options
        self._context = context
        self.capabilities = Capabilities(
            ranged=context.device == "cpu", device_memory=context.device == "npu", max_key_len=MAX_NAME
        )
        self._call_s = options.request_deadline_ms / 1000 + 1.0
        self._being_written = BeingWritten()
        self._making = threading.Lock()
        self._lookup: Link | None = None
        self._moves: HostTransfers | HeteroTransfers | None = None

    # life

    def _connect(self) -> None:
        check_reach("yuanrong", self._context.device)
        library.require_installed()
        deadline_s = self._options.connect_timeout_ms / 1000 + _START_S
        self._lookup = self._link(_LOOKUP_S)
        try:
            self._lookup.start()
            host = self._host_transfers() if self._context.role == "worker" and self._context.device == "cpu" else None
            greeting, child = self._lookup.open(deadline_s)
            if self._context.device == "npu":
                self._say_what_is_missing(greeting.names)
            else:
                _check_copies(greeting, child)
            if host is not None:
                host.link.open(deadline_s)
            elif self._context.role == "worker":
                self._mover()
        except OSError as error:
            self._disconnect()
            raise OSError(f"no yuanrong worker is reached at {self._options.worker_addr}: {brief(str(error))}") from None
        except BaseException:
            self._disconnect()
            raise

    def _say_what_is_missing(self, lines: Sequence[str]) -> None:
        """A warning where it is something that was asked for."""
        for line in lines:
            asked = "pre_register" in line and self._options.registers_device_memory
            logger.log(logging.WARNING if asked else logging.INFO, "kvpool: %s", line)

    def _link(self, patience_s: float) -> Link:
        options = self._options
        host, port = split_address(options.worker_addr)
        npu = self._context.device == "npu"
        settings = Settings(
            host=host.strip("[]"),
            port=port,
            connect_ms=options.connect_timeout_ms,
            request_ms=options.request_timeout_ms,
            exclusive=options.enable_exclusive_connection,
            hetero=npu,
        )
        slowest = max(options.connect_timeout_ms, options.request_deadline_ms + options.get_sub_timeout_ms) / 1000
        return Link(settings, slowest, patience_s)

    def _mover(self) -> HostTransfers | HeteroTransfers:
        """What moves bytes; made by ``open`` of a worker, else by the first transfer."""
        self._ask_lookup()  # Closed after close
        if self._context.device != "npu":
            return self._host_transfers()
        with self._making:
            if self._moves is None:
                self._moves = self._hetero()
            return self._moves

    def _host_transfers(self) -> HostTransfers:
        """Its process is started, and may not have reached the worker yet. Tools are content with one process for everything."""
        with self._making:
            if not isinstance(self._moves, HostTransfers):
                alone = self._context.role in ("worker", "scheduler")
                link = self._link(self._call_s + self._options.get_sub_timeout_ms / 1000) if alone else self._ask_lookup()
                link.start()
                self._moves = HostTransfers(link, self._call_s, self._options.get_sub_timeout_ms)
            return self._moves

    def _hetero(self) -> HeteroTransfers:
        options = self._options
        host, port = split_address(options.worker_addr)
        settings = Settings(
            host.strip("[]"), port, options.connect_timeout_ms, options.request_timeout_ms, options.enable_exclusive_connection
        )
        try:
            remote = options.enable_remote_h2d and self._context.role == "worker"
            return HeteroTransfers(library.load(), settings, self._context.device_id, options.get_sub_timeout_ms, remote)
        except (RuntimeError, ImportError) as error:
            raise OSError(str(error)) from None

    def _disconnect(self) -> None:
        with self._making:
            transfer, self._moves = self._moves, None
        if transfer is not None:
            transfer.close()
        if self._lookup is not None:
            self._lookup.close()
        self._lookup = None

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        if self._options.registers_device_memory and isinstance(self._moves, HeteroTransfers):
            self._moves.register(regions)

    # hooks

    def _ask_lookup(self) -> Link:
        link = self._lookup
        if link is None:
            raise Closed("the store is closed")
        return link

    def _exists(self, keys: Sequence[bytes]) -> list[Answer]:
        reply, _ = self._ask_lookup().ask("exists", self.limits.lookup_s, names=names_of(keys))
        return [Hit(Tier.REMOTE, 0) if found else MISS for found in reply.found]

    def _put(self, batch: Batch) -> list[Result]:
        busy = self._being_written.holds(batch.keys)
        if any(busy):
            return [
                Result(Status.BUSY, text="it is being written") if taken else self._put_one(batch, row)
                for row, taken in enumerate(busy)
            ]
        return self._mover().put(batch)

    def _put_one(self, batch: Batch, row: int) -> Result:
        one = Batch(batch.keys[row : row + 1], batch.addresses[row : row + 1], batch.sizes)
        return self._mover().put(one)[0]

    def _get(self, batch: Batch) -> list[Result]:
        return self._mover().get(batch)

    def _remove(self, keys: Sequence[bytes]) -> list[Result]:
        there = self._look(keys)
        names = names_of(key for key, answer in zip(keys, there, strict=True) if isinstance(answer, Hit))
        if not names:
            return [Result(Status.MISSING)] * len(keys)
        reply, _ = self._ask_lookup().ask("delete", self._call_s, names=names)
        failed, left = set(reply.names), iter(names)
        good, bad = Result(Status.OK), Result(Status.TRANSIENT, text="the library could not delete it")
        return [
            Result(Status.MISSING) if not isinstance(answer, Hit) else bad if next(left) in failed else good for answer in there
        ]

    def _stats(self) -> StoreStats:
        """Nothing: the library does not tell sizes and counts."""
        return StoreStats()

    def _health(self) -> Health:
        """A lookup of one key: health_check of the library takes its whole connect timeout where the worker is gone."""
        self._ask_lookup().ask("exists", self.limits.lookup_s, names=[PROBE])
        return Health(True)

    def _fault(self, error: BaseException) -> Result:
        return result_of(str(error)) if isinstance(error, LibraryError | RuntimeError) else super()._fault(error)

    # pieces

    def begin_write(self, keys: Sequence[bytes], nbytes: int, deadline_s: float) -> Writer:
        if nbytes <= 0:
            raise ValueError(f"objects of {nbytes} bytes cannot be stored")
        try:
            transfers = self._mover()
        except Exception as error:  # noqa: BLE001 - travels in the results
            return EndedWriter([self._fault(error)] * len(keys))
        if not isinstance(transfers, HostTransfers):
            return EndedWriter([Result(Status.FATAL, text="NPU objects cannot be written in pieces")] * len(keys))
        return PieceWriter(transfers, self._look, self._fault, self._being_written, keys, nbytes, deadline_s)

    def begin_read(self, keys: Sequence[bytes], deadline_s: float) -> Reader:
        try:
            transfers = self._mover()
        except Exception as error:  # noqa: BLE001 - travels in the results
            return EndedReader([self._fault(error)] * len(keys))
        if not isinstance(transfers, HostTransfers):
            return EndedReader([Result(Status.FATAL, text="NPU objects cannot be read in pieces")] * len(keys))
        return PieceReader(transfers, self._fault, keys, deadline_s)

    def close(self) -> None:
        """Calls of the client processes can be left alone at any moment, so these always end."""
        super().close()
        if self._context.device != "npu":
            self._disconnect()


def _check_copies(greeting: Reply, child: Child) -> None:
    """ValueError where the kernel does not let this process reach the memory of its client process."""
    try:
        told, memory = greeting.buffers[0], np.zeros(len(GREETING), dtype=np.uint8)
        assert told is not None
        far, near, size = (np.array([value], dtype=np.int64) for value in (told.address, memory.ctypes.data, len(GREETING)))
        child.read(far, near, size)
        assert memory.tobytes() == GREETING
    except OSError as error:
        raise ValueError(
            f"the yuanrong store copies by process_vm_writev, which this system refuses ({error.strerror or error}): set"
            " kernel.yama.ptrace_scope to 0 or 1 and allow the call in the container's seccomp profile"
        ) from None
