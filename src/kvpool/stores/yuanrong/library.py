"""The library: importing it, and what the installed version lacks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

Native = Any
"""A module, class or object of the library, which has no types."""

DISTRIBUTION = "openyuanrong-datasystem"
LOG_DIR = "DATASYSTEM_CLIENT_LOG_DIR"
_FEATURES = {
    "mset_d2h_from_multi_buffers": "NPU memory is written through lists of blobs",
    "mget_h2d_from_multi_buffers": "NPU memory is read through lists of blobs",
    "batch_is_exist": "lookups use exist",
    "pre_register_device_memory": "enable_dev_mem_pregister has no effect",
}
"""Calls of HeteroClient that only later versions have, and what follows where they are missing."""


def installed() -> bool:
    """Whether the package is there; imports nothing of it."""
    try:
        return importlib.util.find_spec("yr.datasystem") is not None
    except ModuleNotFoundError:
        return False


def require_installed() -> None:
    """ValueError, in one line, that names what to install."""
    if not installed():
        raise ValueError(f"backend yuanrong needs the Python package {DISTRIBUTION}: pip install {DISTRIBUTION}")


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def make_log_folder(env: MutableMapping[str, str]) -> str:
    """The folder of the client's logs, made. The library reads its variable while it is imported, so it is set before.

    OSError, in one line, where the folder that the variable names cannot be made; without the variable a folder that cannot be made
    is replaced by a temporary one."""
    named = env.get(LOG_DIR, "").strip()
    folder = Path(named).expanduser() if named else Path(env.get("HOME", "/nonexistent"), ".datasystem", "logs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        if named:
            raise OSError(f"{LOG_DIR}={named!r}: the folder cannot be used: {error.strerror or error}") from None
        folder = Path(tempfile.mkdtemp(prefix="kvpool-datasystem-logs-"))
    env[LOG_DIR] = str(folder)
    return str(folder)


def load() -> Native:
    """The module ``yr.datasystem``. ImportError, in one line, where it cannot be imported."""
    make_log_folder(os.environ)
    return importlib.import_module("yr.datasystem")


def missing_features(module: Native) -> list[str]:
    """A line per call that this version lacks and what follows."""
    hetero = getattr(module, "HeteroClient", None)
    return [
        f"{DISTRIBUTION} {version()} has no HeteroClient.{call}: {meaning}"
        for call, meaning in _FEATURES.items()
        if not hasattr(hetero, call)
    ]


def connect_arguments(client_class: Native, connect_ms: int, request_ms: int, exclusive: bool) -> dict[str, Any]:
    """Keyword arguments of a client; the name of the connect timeout differs by version."""
    known = inspect.signature(client_class.__init__).parameters
    timeout = "connect_timeout_ms" if "connect_timeout_ms" in known else "timeout_ms"
    wanted = {timeout: connect_ms, "req_timeout_ms": request_ms, "enable_exclusive_connection": exclusive}
    return {name: value for name, value in wanted.items() if name in known}
