"""mmc-meta.conf and mmc-local.conf of a MemCache that kvpool starts, or writes the files for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

WORLD_SIZE = 64
LOCAL = "ock.mmc.local_service"


class Addresses(NamedTuple):
    """host:port of what the MetaService listens on."""

    meta: str
    config_store: str
    metrics: str


def write_files(folder: Path, where: Addresses, protocol: str, owner_dram: int, engine_dram: int) -> dict[str, str]:
    """Write the files of the MetaService, of engines, and (with ``owner_dram``) of the owner of the memory. Sizes in bytes. The
    variables that name them."""
    meta, local = folder / "mmc-meta.conf", folder / "mmc-local.conf"
    log = {"ock.mmc.log_path": str(folder)}  # it makes logs/ there; the default lies under /var/log, which few users may write
    meta.write_text(text_of({**meta_values(where), **log}))
    local.write_text(text_of(local_values(where, protocol, engine_dram, max(owner_dram, engine_dram))))
    if owner_dram:
        values = local_values(where, protocol, owner_dram, owner_dram)
        (folder / "mmc-local-standalone.conf").write_text(text_of(values))
    return {"MMC_META_CONFIG_PATH": str(meta), "MMC_LOCAL_CONFIG_PATH": str(local)}


def meta_values(where: Addresses) -> dict[str, str]:
    """mmc-meta.conf."""
    return {
        "ock.mmc.meta_service_url": f"tcp://{where.meta}",
        "ock.mmc.meta_service.config_store_url": f"tcp://{where.config_store}",
        "ock.mmc.meta_service.metrics_url": f"http://{where.metrics}",
        "ock.mmc.meta_service.lru_type": "lru",  # the default evicts by shards of keys, so that new objects go before old ones
        "ock.mmc.log_level": "error",
    }


def local_values(where: Addresses, protocol: str, dram: int, largest: int) -> dict[str, str]:
    """mmc-local.conf of a process that gives ``dram`` bytes; ``largest`` is what any process gives."""
    return {
        "ock.mmc.meta_service_url": f"tcp://{where.meta}",
        f"{LOCAL}.config_store_url": f"tcp://{where.config_store}",
        f"{LOCAL}.world_size": str(WORLD_SIZE),
        f"{LOCAL}.protocol": protocol,
        f"{LOCAL}.dram.size": _size(dram),
        f"{LOCAL}.max.dram.size": _size(largest),
        "ock.mmc.client.timeout.seconds": "10",  # of a call whose answer does not come; the default is 60
        "ock.mmc.log_level": "error",
    }


def text_of(values: Mapping[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in values.items())


def _size(nbytes: int) -> str:
    """In the units that the guides use."""
    if nbytes % (1 << 30) == 0:
        return f"{nbytes >> 30}GB"
    return f"{-(-nbytes >> 20)}MB"
