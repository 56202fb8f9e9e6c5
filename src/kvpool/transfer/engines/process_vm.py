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
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvpool.devices.copy_threads import share_runs
from kvpool.devices.process_memory import Int64, readv
from kvpool.stores.base import Result, Status
from kvpool.transfer.base import Capabilities, OneSidedEngine, Runs

if TYPE_CHECKING:
    from kvpool.transfer import EngineSettings

_SAMPLE = 32


class Address(msgspec.Struct, frozen=True):
    """``token`` lies at ``at`` in process ``pid`` as that process sees its own id."""

    pid: int
    at: int
    token: bytes


class ProcessVmEngine(OneSidedEngine):
    """See the module."""

    name = "process_vm"
    call_bytes = 64 << 20
    capabilities = Capabilities(one_host=True)

    def __init__(self, settings: EngineSettings) -> None:
        if settings.device != "cpu":
            raise ValueError(f"transfer_engine process_vm reaches host memory only, not that of device {settings.device!r}")
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_SAMPLE), _SAMPLE)

    def open(self, regions: Sequence[tuple[int, int]]) -> None:
        return

    def address(self) -> bytes:
        return msgspec.msgpack.encode(Address(os.getpid(), ctypes.addressof(self._token), self._token.raw))

    def reach(self, address: bytes) -> str:
        peer = msgspec.msgpack.decode(address, type=Address)
        seen = ctypes.create_string_buffer(_SAMPLE)
        runs = Runs(*(np.array([n], dtype=np.int64) for n in (peer.at, ctypes.addressof(seen), _SAMPLE)))
        result = self._fetch(address, runs)
        if result.status is not Status.OK:
            hint = " (kernel.yama.ptrace_scope forbids it?)" if result.code == errno.EPERM else ""
            return f"process_vm_readv from process {peer.pid}: {result.text}{hint}: use transfer_engine local_host"
        if seen.raw != peer.token:
            return f"process {peer.pid} is not prefill's worker: another container? Use transfer_engine local_host"
        return ""

    def _fetch(self, address: bytes, runs: Runs) -> Result:
        pid = msgspec.msgpack.decode(address, type=Address).pid
        try:
            share_runs(partial(_read, pid), runs.targets, runs.sources, runs.sizes)
        except OSError as error:
            return Result(Status.FATAL, code=error.errno, text=str(error.strerror))
        return Result(Status.OK, runs.nbytes)

    def close(self) -> None:
        return


def _read(pid: int, ours: Int64, theirs: Int64, sizes: Int64) -> None:
    moved, code = readv(pid, ours, theirs, sizes)
    if moved != int(sizes.sum()):
        code = code or errno.EFAULT  # a short count means that the rest is not mapped there
        raise OSError(code, os.strerror(code))
