"""The installed Mooncake: nine distributions provide it, one for each kind of machine, and versions differ in what they can do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvpool.stores.context import Device
from kvpool.stores.mooncake.client import Client

DISTRIBUTIONS = {
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
    "mooncake-transfer-engine-non-cuda": "no GPU",
    "mooncake-transfer-engine-npu": "Ascend NPU",
    "mooncake-transfer-engine-efa": "AWS EFA, CUDA 12",
    "mooncake-transfer-engine-efa-cuda13": "AWS EFA, CUDA 13",
    "mooncake-transfer-engine-efa-non-cuda": "AWS EFA, no GPU",
    "mooncake-transfer-engine-musa": "MUSA",
    "mooncake-transfer-engine-rocm": "ROCm",
}
_FOR: dict[Device, str] = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine (CUDA 12) or mooncake-transfer-engine-cuda13",
    "npu": "mooncake-transfer-engine-npu (glibc 2.35 or newer)",
}
_SYSTEM = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "liburing": "liburing2",
    "libcurl": "libcurl4",
}
OLDEST = "0.3.11.post1"
WITH_TENANTS = "0.3.12"
WITH_RANGES = "0.3.13"
Lookup = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Library:
    """The module ``mooncake.store`` of one distribution."""

    module: Any
    distribution: str
    version: str

    def client(self) -> Client:
        made: Client = self.module.MooncakeDistributedStore()
        return made

    @property
    def has_ranges(self) -> bool:
        names = ("batch_put_session_start", "batch_get_session_start")
        return not older(self.version, WITH_RANGES) and all(hasattr(self.module.MooncakeDistributedStore, name) for name in names)

    def put_config(self, *, same_node: bool = False, segment: str = "") -> object:
        """Where a put shall go; the defaults leave it to the master."""
        config: Any = self.module.ReplicateConfig()
        if same_node:
            config.prefer_alloc_in_same_node = True
        if segment:
            config.preferred_segment = segment
        placed: object = config
        return placed


def load(device: Device, *, tenants: bool = False) -> Library:
    """Import it. ValueError naming what to install where it is missing, too old for what is switched on, or installed twice."""
    distribution, version = installed(device)
    if older(version, OLDEST):
        raise ValueError(f"{distribution} {version} is too old: install {OLDEST} or newer")
    if tenants and older(version, WITH_TENANTS):
        raise ValueError(f"a tenant_id other than default needs Mooncake {WITH_TENANTS} or newer; {distribution} is {version}")
    try:
        return Library(importlib.import_module("mooncake.store"), distribution, version)
    except ImportError as error:
        raise ValueError(f"{distribution} {version} cannot be imported: {error}{_system_package(str(error))}") from None


def installed(device: Device, look_up: Lookup | None = None) -> tuple[str, str]:
    """Name and version of the distribution that is there."""
    version_of = look_up or _version
    found = [(name, version) for name in DISTRIBUTIONS if (version := version_of(name)) is not None]
    if not found:
        raise ValueError(f"Mooncake is not installed: pip install {_FOR[device]}")
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ValueError(f"{names} are both installed and overwrite each other's files: keep one, here {_FOR[device]}")
    return found[0]


def older(version: str, than: str) -> bool:
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    """``0.3.11.post1`` is (0, 3, 11, 1): after 0.3.11, before 0.3.12."""
    release = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    return tuple((release + [0] * 4)[:4])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _system_package(text: str) -> str:
    wanted = [package for library, package in _SYSTEM.items() if library in text]
    return f" (install the system package {wanted[0]})" if wanted else ""
