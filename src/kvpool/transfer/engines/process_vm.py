"""One copy, straight out of the other process: process_vm_readv of Linux, for processes of one user on one host.

The kernel allows it only where one process may trace the other; the Yama module of stock Ubuntu does not. So a peer counts as
reached only when bytes that its signed address promises have been read from it: that also tells a process of another container,
or a new one under an old id, from the real one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvpool.stores.base import Result, Status
from kvpool.transfer.base import OVERDUE, Capabilities, Int64, OneSidedEngine, Runs

if TYPE_CHECKING:
    from kvpool.transfer import EngineSettings

_IOVECS = 1024  # the kernel's limit (UIO_MAXIOV)
_CALL_BYTES = 64 << 20  # between two looks at the clock
_SAMPLE = 32


class Address(msgspec.Struct, frozen=True):
    """``token`` lies at ``at`` in process ``pid`` as that process sees its own id."""

    pid: int
    at: int
    token: bytes


class ProcessVmEngine(OneSidedEngine):
    """See the module."""

    name = "process_vm"
    capabilities = Capabilities(one_host=True)

    def __init__(self, settings: EngineSettings) -> None:
        if settings.device != "cpu":
            raise ValueError(f"transfer_engine process_vm reaches host memory only, not that of device {settings.device!r}")
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_SAMPLE), _SAMPLE)
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        size = ctypes.c_ulong
        self._readv.argtypes = [ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size]

    def open(self, regions: Sequence[tuple[int, int]]) -> None:
        return

    def address(self) -> bytes:
        return msgspec.msgpack.encode(Address(os.getpid(), ctypes.addressof(self._token), self._token.raw))

    def reach(self, address: bytes) -> str:
        peer = msgspec.msgpack.decode(address, type=Address)
        seen = ctypes.create_string_buffer(_SAMPLE)
        runs = Runs(*(np.array([n], dtype=np.int64) for n in (peer.at, ctypes.addressof(seen), _SAMPLE)))
        result = self._copy(peer.pid, runs)
        if result.status is not Status.OK:
            hint = " (kernel.yama.ptrace_scope forbids it?)" if result.code == errno.EPERM else ""
            return f"process_vm_readv from process {peer.pid}: {result.text}{hint}: use transfer_engine local_host"
        if seen.raw != peer.token:
            return f"process {peer.pid} is not prefill's worker: another container? Use transfer_engine local_host"
        return ""

    def read(self, address: bytes, runs: Runs, deadline_s: float) -> Result:
        end = time.monotonic() + deadline_s
        pid = msgspec.msgpack.decode(address, type=Address).pid
        for part in _parts(runs):
            if time.monotonic() > end:
                return OVERDUE
            result = self._copy(pid, part)
            if result.status is not Status.OK:
                return result
        return Result(Status.OK, runs.nbytes)

    def _copy(self, pid: int, runs: Runs) -> Result:
        """Runs that one call can take. A short count means that the rest is not mapped there."""
        ours, theirs = _vectors(runs.targets, runs.sizes), _vectors(runs.sources, runs.sizes)
        count = len(runs.sizes)
        moved = self._readv(pid, ours.ctypes.data, count, theirs.ctypes.data, count, 0)
        if moved == runs.nbytes:
            return Result(Status.OK, moved)
        code = ctypes.get_errno() if moved < 0 else errno.EFAULT
        return Result(Status.FATAL, code=code, text=os.strerror(code))

    def close(self) -> None:
        return


def _vectors(addresses: Int64, sizes: Int64) -> Int64:
    """struct iovec[]: address and length of each run."""
    return np.ascontiguousarray(np.stack([addresses, sizes], axis=1))


def _parts(runs: Runs) -> list[Runs]:
    """Split by number and bytes; a single run larger than a part stays whole (the kernel moves at most 2 GiB a call)."""
    parts, start = [], 0
    ends = np.cumsum(runs.sizes)
    while start < len(ends):
        base = int(ends[start] - runs.sizes[start])
        stop = int(np.searchsorted(ends, base + _CALL_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + _IOVECS)
        rows = slice(start, stop)
        parts.append(Runs(runs.sources[rows], runs.targets[rows], runs.sizes[rows]))
        start = stop
    return parts
