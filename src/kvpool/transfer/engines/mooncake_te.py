"""Mooncake's TransferEngine: tcp between any hosts, rdma and ascend where there is such hardware.

Its library listens on all interfaces, on two ports of its own choice, for anybody who can reach them: that is said at start.
"""

from __future__ import annotations

import ctypes
import importlib
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvpool.stores.base import Result, Status
from kvpool.transfer.base import OVERDUE, Capabilities, OneSidedEngine, Runs

if TYPE_CHECKING:
    from kvpool.transfer import EngineSettings

PACKAGE = {"tcp": "mooncake-transfer-engine-non-cuda", "rdma": "mooncake-transfer-engine", "ascend": "mooncake-transfer-engine-npu"}
_CALL_BYTES = 64 << 20
_CALL_RUNS = 1024
_SAMPLE = 64
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
    capabilities = Capabilities(device_memory=True)

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
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
            code = library.register_memory(address, nbytes)
            if code:
                raise OSError(f"transfer_engine mooncake: registering {nbytes} bytes answered {code}")
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
        result = self._copy(peer.session, runs)
        if result.status is not Status.OK:
            return f"mooncake cannot read from {peer.session}: {result.text}"
        return "" if seen.raw == peer.token else f"what answers at {peer.session} is not prefill's worker"

    def read(self, address: bytes, runs: Runs, deadline_s: float) -> Result:
        end = time.monotonic() + deadline_s
        session = msgspec.msgpack.decode(address, type=Address).session
        start, ends = 0, np.cumsum(runs.sizes)
        while start < len(ends):
            if time.monotonic() > end:
                return OVERDUE
            base = int(ends[start] - runs.sizes[start])
            stop = int(np.searchsorted(ends, base + _CALL_BYTES, side="right"))
            rows = slice(start, min(max(stop, start + 1), start + _CALL_RUNS))
            result = self._copy(session, Runs(runs.sources[rows], runs.targets[rows], runs.sizes[rows]))
            if result.status is not Status.OK:
                return result
            start = rows.stop
        return Result(Status.OK, runs.nbytes)

    def _copy(self, session: str, runs: Runs) -> Result:
        library = self._library
        if library is None:
            return _CLOSED
        lists = (runs.targets.tolist(), runs.sources.tolist(), runs.sizes.tolist())
        code = library.batch_transfer_sync_read(session, *lists)
        if code == 0:
            return Result(Status.OK, runs.nbytes)
        return Result(Status.FATAL, code=code, text=f"batch_transfer_sync_read answered {code}")

    def close(self) -> None:
        # Not destroyed here: a read may be running, and a call after the library's end kills the process.
        return
