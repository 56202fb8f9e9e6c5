"""What a configuration names although it is refused: one mistake must not hide the disks and the store it is about."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvpool.options.ascend_store import BackendName
from kvpool.options.configfile import read_text
from kvpool.options.connectors import MULTI, POOL, POOL_OLD_NAME, REMOTE_D2H
from kvpool.options.errors import OptionError
from kvpool.options.jsonfile import read_json
from kvpool.options.memcache_conf import LOCAL, parse_conf
from kvpool.options.scalars import read_bool


@dataclass(frozen=True, slots=True)
class Disks:
    """Directories and block devices of the SSD tier that is on; ``wiped``: UBS IO treats its devices as new."""

    directories: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    wiped: bool = True


def top_level(text: str, source: str) -> Mapping[str, object]:
    """The object of a kv-transfer-config; empty where it is none."""
    with suppress(OptionError):
        return read_json(text, source)
    return {}


def pool_options(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The extra config of the pool's connector, alone or below MultiConnector; empty where there is none."""
    for entry in _connectors(raw):
        if entry.get("kv_connector") in (POOL, POOL_OLD_NAME):
            own = entry.get("kv_connector_extra_config")
            return own if isinstance(own, Mapping) else {}
    return {}


def layerwise(raw: Mapping[str, object]) -> bool:
    """Whether the pool saves and loads layer by layer."""
    return _on(pool_options(raw).get("use_layerwise"))


def remote_d2h(raw: Mapping[str, object]) -> bool:
    """Whether KV goes from prefill's device to decode's host memory."""
    return any(entry.get("kv_connector") == REMOTE_D2H for entry in _connectors(raw))


def _connectors(raw: Mapping[str, object]) -> list[Mapping[str, object]]:
    entries: list[object] = [raw]
    extra = raw.get("kv_connector_extra_config")
    if raw.get("kv_connector") == MULTI and isinstance(extra, Mapping) and isinstance(extra.get("connectors"), list):
        entries = extra["connectors"]
    return [entry for entry in entries if isinstance(entry, Mapping)]


def disks(backend: BackendName, extra: Mapping[str, object], path: str) -> Disks:
    """``extra`` are the connector's options, ``path`` is the store's own file ("" where there is none)."""
    if backend == "local":
        return _directory(extra)
    with suppress(OptionError):
        if path and backend == "mooncake":
            return _directory(read_json(read_text(path, path), path))
        if path and backend == "memcache":
            return _devices(parse_conf(read_text(path, path), path))
    return Disks()


def _directory(options: Mapping[str, object]) -> Disks:
    if not _on(options.get("enable_ssd_offload")):
        return Disks()
    return Disks(directories=(str(options.get("ssd_offload_path") or ""),))


def _devices(pairs: Mapping[str, str]) -> Disks:
    named = pairs.get("ubsio.disk.path", "")
    if not named or not _on(pairs.get(f"{LOCAL}.storage.enabled")):
        return Disks()
    return Disks(devices=tuple(named.split(":")), wiped=_on(pairs.get("ubsio.standalone.force_new_disk", "true")))


def _on(value: object) -> bool:
    with suppress(ValueError):
        return read_bool(value)
    return False
