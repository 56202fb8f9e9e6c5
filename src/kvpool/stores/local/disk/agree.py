"""All processes of a pool must have the same disk tier, or none: the settings of those that live are in the file ``tiers``."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict

from kvpool.stores.disk_settings import DiskSettings
from kvpool.stores.local.pool import Pool
from kvpool.stores.local.pool_dir import PoolDir

_FILE = "tiers"


def agree(pool: Pool, wanted: DiskSettings | None) -> None:
    """Join those that use the pool with these settings; ValueError that names what differs. Under the pool's lock."""
    settings, members = _read(pool.directory)
    peers = pool.viewers()
    try:
        living = [member for member in members if peers.alive(member)]
    finally:
        peers.close()
    if living and settings != wanted:
        raise ValueError(
            f"pool {pool.directory.path} is in use with other settings of its disk tier: {_difference(settings, wanted)}"
        )
    raw = {"settings": None if wanted is None else asdict(wanted), "members": [*living, pool.client]}
    aside = f"{_FILE}.new"
    with suppress(FileNotFoundError):
        os.unlink(aside, dir_fd=pool.directory.fd)
    with os.fdopen(pool.directory.open_file(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(json.dumps(raw).encode())
    os.replace(aside, _FILE, src_dir_fd=pool.directory.fd, dst_dir_fd=pool.directory.fd)


def agreed(directory: PoolDir) -> DiskSettings | None:
    """What the pool was last used with; for tools that join whatever is there."""
    return _read(directory)[0]


def _read(directory: PoolDir) -> tuple[DiskSettings | None, list[int]]:
    try:
        with os.fdopen(directory.open_file(_FILE, os.O_RDONLY), "rb") as file:
            raw = json.loads(file.read(1 << 20))
        settings = None if raw["settings"] is None else DiskSettings(**raw["settings"])
        return settings, [int(member) for member in raw["members"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None, []


def _difference(there: DiskSettings | None, here: DiskSettings | None) -> str:
    if there is None or here is None:
        return f"{'no disk tier' if there is None else there.folder} there, {'no disk tier' if here is None else here.folder} here"
    return ", ".join(here.differences(there))
