"""Which version of a store's library the configuration needs, and which package provides it."""

from __future__ import annotations

import re

from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import DEFAULT_TENANT, MooncakeOptions
from kvpool.options.probe import Device

_PACKAGES: dict[str, dict[str, str]] = {
    "mooncake": {
        "cpu": "mooncake-transfer-engine-non-cuda",
        "cuda": "mooncake-transfer-engine",
        "npu": "mooncake-transfer-engine-npu",
    },
    "memcache": {"": "memcache-hybrid and memfabric-hybrid"},
    "yuanrong": {"": "openyuanrong-datasystem"},
}
_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:\.?post(\d+))?")


def package(backend: str, device: Device | None) -> str:
    """What to install for ``backend`` on a machine with this kind of device; "" for local."""
    names = _PACKAGES.get(backend, {})
    return names.get("") or names.get(device or "cpu", "")


def needs(backend: str, options: OptionModel | None, *, ranged: bool) -> list[tuple[str, str]]:
    """(what, lowest version) for everything that is switched on. ``ranged``: objects are moved in pieces (use_layerwise)."""
    found: list[tuple[str, str]] = []
    if backend == "mooncake":
        found.append(("kvpool", "0.3.11.post1"))
        if isinstance(options, MooncakeOptions) and options.tenant_id != DEFAULT_TENANT:
            found.append((f"tenant_id={options.tenant_id}", "0.3.12"))
        if ranged:
            found.append(("use_layerwise", "0.3.13"))
    if isinstance(options, LocalConf) and options.storage_enabled:
        found.append(("storage.enabled", "1.2.0"))
    return found


def check_version(
    backend: str, installed: str, options: OptionModel | None, *, ranged: bool = False, device: Device | None = None
) -> None:
    """OptionError where the installed version lacks what is switched on; a version of unknown form passes."""
    have = _parsed(installed)
    for what, lowest in needs(backend, options, ranged=ranged):
        if have is not None and have < (_parsed(lowest) or have):
            reason = f"is too old: {what} needs at least {lowest} (package {package(backend, device)})"
            raise OptionError(f"version of {backend}", installed, reason)


def _parsed(version: str) -> tuple[tuple[int, ...], int] | None:
    """Release and post number; what follows (rc, dev, local parts) does not count."""
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    release = tuple(int(part) for part in match[1].split("."))
    return (*release, *([0] * (4 - len(release)))), int(match[2] or 0)
