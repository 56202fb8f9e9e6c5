"""What the cases of docs/stores/mistakes.md are made of: a host that is what a test says, and short ways to read each input."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.options import Deployment
from kvpool.options.block_device import Disk
from kvpool.options.check import check
from kvpool.options.load import read_ascend_store
from kvpool.options.mooncake_json import read_mooncake
from kvpool.options.probe import Probe

GIB = 1 << 30
MASTER = {"master_server_address": "10.0.0.1:50088"}
WORKER = {"worker_addr": "10.0.0.1:31501"}
L = "ock.mmc.local_service"
LOCAL = f"ock.mmc.meta_service_url = tcp://h:5000\n{L}.config_store_url = tcp://h:6000\n"
META = "ock.mmc.meta_service_url = tcp://h:5000\nock.mmc.meta_service.config_store_url = tcp://h:6000\n"
Lines = list[str]


class Case(NamedTuple):
    """``seen`` is in the line that ``wrong`` ends with, and in none of ``right``."""

    seen: str
    wrong: Callable[[Path], Lines]
    right: Callable[[Path], Lines]


class Host(Probe):
    """A host with plenty of everything, but for what a test says."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.facts = facts

    def memory_available(self) -> int | None:
        return self.facts.get("memory", 1 << 50)

    def huge_pages(self) -> int | None:
        return self.facts.get("pages", 1 << 20)

    def rdma_devices(self) -> int:
        return self.facts.get("rdma", 1)

    def disk(self, path: str) -> Disk:
        return self.facts.get("disk", Disk("block device"))

    def package_folder(self, name: str) -> str | None:
        return self.facts.get("package")

    def is_folder(self, path: str) -> bool:
        return self.facts.get("folder", True)

    def can_make(self, path: str) -> bool:
        return self.facts.get("can_make", True)


HOST_FACTS = ("memory", "pages", "rdma", "disk", "package", "folder", "can_make")


def on(**facts: Any) -> Deployment:
    """An engine; facts of the host go to its Host."""
    host = Host(**{name: facts.pop(name) for name in HOST_FACTS if name in facts})
    return Deployment(host=host, **facts)


def mooncake(raw: Mapping[str, object] = {}, env: Mapping[str, str] = {}, deployment: Deployment | None = None) -> Lines:
    text = json.dumps({**MASTER, **raw})
    return read_mooncake(text, "mooncake.json", env, deployment or on()).warnings


def pool(folder: Path, backend: str, text: str | None = None, **given: Any) -> Lines:
    """A connector with this backend; ``text`` becomes its file. ``given``: env, deployment, options."""
    variable = {"mooncake": "MOONCAKE_CONFIG_PATH", "memcache": "MMC_LOCAL_CONFIG_PATH", "yuanrong": "YR_CONFIG_PATH"}[backend]
    env = dict(given.pop("env", {}))
    if text is not None:
        (folder / backend).write_text(text)
        env[variable] = str(folder / backend)
    deployment = given.pop("deployment", on())
    return read_ascend_store({"backend": backend, **given}, kv_role="kv_both", env=env, deployment=deployment).warnings


def checked(folder: Path, files: Mapping[str, str], **given: Any) -> Lines:
    """`config check` of these files. ``given``: env, deployment, services, proxy_port; a file named ``meta`` goes to --meta."""
    paths = {name: folder / name for name in files}
    for name, path in paths.items():
        path.write_text(files[name])
    env, meta = given.pop("env", {}), paths.pop("meta", None)
    given.setdefault("deployment", on())
    return check(None, [str(path) for path in paths.values()], env, meta=str(meta) if meta else None, **given).warnings
