"""Mooncake's TransferEngine: tcp between any hosts, rdma and ascend where there is such hardware.

Its library listens on all interfaces, on two ports of its own choice, for anybody who can reach them: that is said at start.

A call that has answered an error, for one entry or because its own time was up, may still have other entries under way, and nothing
says when they end. So it never gets our targets: it reads into buffers of ours, and what has arrived is copied. A buffer whose call
failed is never used again, nor freed.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.devices import copy_engine
from kvpool.stores.base import Result, Status
from kvpool.transfer.base import Int64, OneSidedEngine, Runs

if TYPE_CHECKING:
    from kvpool.transfer import EngineSettings

PACKAGE = {"tcp": "mooncake-transfer-engine-non-cuda", "rdma": "mooncake-transfer-engine", "ascend": "mooncake-transfer-engine-npu"}
_LOST_BUFFERS = 16
_SAMPLE = 64
_Buffer = NDArray[np.uint8]
_lost: list[_Buffer] = []  # of the process, like the library: it may write into them for as long as it lives
_CLOSED = Result(Status.FATAL, text="the transfer engine is not open")


class Address(msgspec.Struct, frozen=True):
    """``session`` is the library's name for the process; ``token`` lies at ``at`` in it."""

    session: str
    protocol: str
    at: int
    token: bytes


class MooncakeEngine(OneSidedEngine):
    """See the module. The library's calls block; they end by themselves when a peer is gone."""

    name = "mooncake"
    call_bytes = 16 << 20  # what a buffer holds

    def __init__(self, settings: EngineSettings) -> None:
        if settings.device != "cpu":
            raise ValueError(
                f"transfer_engine mooncake reads through buffers in host memory: no copy engine for device {settings.device!r} yet"
            )
        self._settings = settings
        self._copier = copy_engine(settings.device)
        self._free: list[_Buffer] = []
        self._lock = threading.Lock()
        self._failed = 0
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_SAMPLE), _SAMPLE)
        self._library: Any = None

    def open(self, regions: Sequence[tuple[int, int]]) -> None:
        protocol = self._settings.protocol
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise OSError(f"transfer_engine mooncake: install {PACKAGE[protocol]} ({error})") from None
        library = module.TransferEngine()
        code = library.initialize(self._settings.host, "P2PHANDSHAKE", protocol, "")
        if code:
            raise OSError(f"transfer_engine mooncake: initialize({self._settings.host}, {protocol}) answered {code}")
        for address, nbytes in [*regions, (ctypes.addressof(self._token), _SAMPLE)]:
            if problem := _register(library, address, nbytes):
                raise OSError(f"transfer_engine mooncake: {problem}")
        self._library = library

    def address(self) -> bytes:
        host = self._settings.host
        session = f"[{host}]" if ":" in host else host
        port = self._library.get_rpc_port()
        return msgspec.msgpack.encode(
            Address(f"{session}:{port}", self._settings.protocol, ctypes.addressof(self._token), self._token.raw)
        )

    def reach(self, address: bytes) -> str:
        peer = msgspec.msgpack.decode(address, type=Address)
        if peer.protocol != self._settings.protocol:
            return f"transfer_protocol: {peer.protocol} on prefill, {self._settings.protocol} on decode"
        seen = ctypes.create_string_buffer(_SAMPLE)
        runs = Runs(*(np.array([n], dtype=np.int64) for n in (peer.at, ctypes.addressof(seen), _SAMPLE)))
        result = self._fetch(address, runs)
        if result.status is not Status.OK:
            return f"mooncake cannot read from {peer.session}: {result.text}"
        return "" if seen.raw == peer.token else f"what answers at {peer.session} is not prefill's worker"

    def read(self, address: bytes, runs: Runs, deadline_s: float) -> Result:
        return super().read(address, _cut(runs, self.call_bytes), deadline_s)

    def _fetch(self, address: bytes, runs: Runs) -> Result:
        """Runs that one buffer holds: read into it, then copied to their targets."""
        library, session = self._library, msgspec.msgpack.decode(address, type=Address).session
        if library is None:
            return _CLOSED
        buffer = self._take(library)
        if isinstance(buffer, str):
            return Result(Status.FATAL, text=buffer)
        places = buffer.ctypes.data + np.cumsum(runs.sizes) - runs.sizes
        try:
            code = library.batch_transfer_sync_read(session, places.tolist(), runs.sources.tolist(), runs.sizes.tolist())
        except BaseException:
            self._lose(buffer)
            raise
        if code:
            self._lose(buffer)
            return Result(Status.FATAL, code=code, text=f"batch_transfer_sync_read answered {code}")
        self._copier.copy(runs.targets, places, runs.sizes, into_pool=False)
        with self._lock:
            self._free.append(buffer)
        return Result(Status.OK, runs.nbytes)

    def _take(self, library: Any) -> _Buffer | str:  # noqa: ANN401
        """A registered buffer that no call has, or why there is none."""
        with self._lock:
            if self._failed >= _LOST_BUFFERS:
                return (
                    f"{self._failed} calls have failed, and each has cost a buffer of {self.call_bytes} bytes: restart this engine"
                )
            if self._free:
                return self._free.pop()
        buffer = np.zeros(self.call_bytes, dtype=np.uint8)
        return _register(library, buffer.ctypes.data, buffer.nbytes) or buffer

    def _lose(self, buffer: _Buffer) -> None:
        _lost.append(buffer)
        with self._lock:
            self._failed += 1

    def close(self) -> None:
        # Not destroyed here: a read may be running, and a call after the library's end kills the process.
        return


def _register(library: Any, address: int, nbytes: int) -> str:  # noqa: ANN401
    """What went wrong; "" where nothing did."""
    code = library.register_memory(address, nbytes)
    return f"registering {nbytes} bytes answered {code}" if code else ""


def _cut(runs: Runs, most: int) -> Runs:
    """The same bytes in runs of at most ``most``."""
    if not len(runs.sizes) or int(runs.sizes.max()) <= most:
        return runs
    counts = -(-runs.sizes // most)
    first = np.cumsum(counts) - counts
    offsets: Int64 = (np.arange(int(counts.sum())) - np.repeat(first, counts)) * most
    left = np.repeat(runs.sizes, counts) - offsets
    return Runs(np.repeat(runs.sources, counts) + offsets, np.repeat(runs.targets, counts) + offsets, np.minimum(left, most))
