"""The secret that prefill, decode and proxy share: KVPOOL_SECRET, or on loopback one that this host's user has."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.options.addresses import is_loopback
from kvpool.options.secret import shared_secret
from kvpool.stores.local.pool_dir import default_root, open_dir

_FILE = ".transfer-secret"
_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """``kind`` is named in params, so that a mismatch can be explained: shared, host or none."""

    value: bytes
    kind: str


def find_secret(env: Mapping[str, str], host: str) -> Secret:
    """KVPOOL_SECRET; else on loopback the secret of this user on this host, made on first use; else none.

    OptionError where it is too short, OSError where the host's secret cannot be kept: its folder must belong to this user alone.
    """
    if (value := shared_secret(env)) is not None:
        return Secret(value, "shared")
    return Secret(_host_secret(), "host") if is_loopback(host) else Secret(b"", "none")


def _host_secret() -> bytes:
    root = default_root()
    folder = open_dir(root, private=True, create=True)
    try:
        for _ in range(3):
            try:
                fd = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                _make(folder)
                continue
            try:
                value = os.read(fd, _BYTES)
            finally:
                os.close(fd)
            if len(value) == _BYTES:
                return value
            raise OSError(f"{root / _FILE} is damaged: delete it while no engine runs")
        raise OSError(f"{root / _FILE} cannot be kept")
    finally:
        os.close(folder)


def _make(folder: int) -> None:
    """Whole or not at all: whoever links it first wins."""
    scratch = f"{_FILE}.{secrets.token_hex(8)}"
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        os.write(fd, secrets.token_bytes(_BYTES))
        os.close(fd)
        try:
            os.link(scratch, _FILE, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            return
    finally:
        os.unlink(scratch, dir_fd=folder)


__all__ = ["Secret", "find_secret"]
