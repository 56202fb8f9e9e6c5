"""Files and commands of one pool against one another: `kvpool config check` with more than one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.options.commands import parse_command
from kvpool.options.configfile import read_text
from kvpool.options.deployment import Deployment
from kvpool.options.fields import OptionModel
from kvpool.options.lease import check_lease
from kvpool.options.memcache_conf import LocalConf, MetaConf, read_meta_conf
from kvpool.options.memcache_rules import check_locals, check_meta, check_pair
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_master import SWITCHES as MASTER_SWITCHES
from kvpool.options.mooncake_master import MasterFlags, check_master, read_master
from kvpool.options.report import Section, options_section
from kvpool.options.yuanrong_json import YuanrongOptions
from kvpool.options.yuanrong_worker import SWITCHES as WORKER_SWITCHES
from kvpool.options.yuanrong_worker import WorkerFlags, check_workers, read_worker

SWITCHES = {"mooncake_master": MASTER_SWITCHES, "dscli": WORKER_SWITCHES}
META_VARIABLE = "MMC_META_CONFIG_PATH"


@dataclass(slots=True)
class Parts:
    """What was handed in, by where it stands. ``load_timeout_ms`` is the shortest of the connectors that use one of the stores."""

    mooncake: dict[str, MooncakeOptions] = field(default_factory=dict)
    local: dict[str, LocalConf] = field(default_factory=dict)
    meta: dict[str, MetaConf] = field(default_factory=dict)
    yuanrong: dict[str, YuanrongOptions] = field(default_factory=dict)
    masters: dict[str, MasterFlags] = field(default_factory=dict)
    workers: dict[str, WorkerFlags] = field(default_factory=dict)
    load_timeout_ms: int | None = None

    def add(self, path: str, options: OptionModel) -> None:
        """Keep the options of a file or command that take part."""
        if isinstance(options, MooncakeOptions):
            self.mooncake[path] = options
        elif isinstance(options, LocalConf):
            self.local[path] = options
        elif isinstance(options, MetaConf):
            self.meta[path] = options
        elif isinstance(options, YuanrongOptions):
            self.yuanrong[path] = options
        elif isinstance(options, MasterFlags):
            self.masters[path] = options
        elif isinstance(options, WorkerFlags):
            self.workers[path] = options

    def deadline(self, load_timeout_ms: int) -> None:
        """A connector gives up its loads after this time."""
        shortest = self.load_timeout_ms
        self.load_timeout_ms = load_timeout_ms if shortest is None else min(shortest, load_timeout_ms)


def read_commands(texts: list[str], parts: Parts, deployment: Deployment) -> tuple[list[Section], list[str]]:
    """Parse the commands of services into ``parts``; their sections and warnings."""
    sections, warnings = [], []
    for number, text in enumerate(texts, start=1):
        where = "--service" if len(texts) == 1 else f"--service {number}"
        command = parse_command(text, where, SWITCHES)
        reading = read_master(command, where) if command.service == "mooncake_master" else read_worker(command, where, deployment)
        if reading is None:
            continue
        parts.add(where, reading.options)
        sections.append(options_section(f"{where}: {command.service}", reading.options, reading.sources))
        warnings += reading.warnings
    return sections, warnings


def read_meta(path: str | None, env: Mapping[str, str], parts: Parts) -> list[Section]:
    """The mmc-meta.conf of ``--meta``, else of MMC_META_CONFIG_PATH where a memcache client is there to be compared with it."""
    key = "--meta" if path is not None else META_VARIABLE
    place = path if path is not None else env.get(META_VARIABLE, "")
    if not place or place in parts.meta or (path is None and not parts.local):
        return []
    reading = read_meta_conf(read_text(place, key), place)
    parts.add(place, reading.options)
    return [options_section(f"memcache meta: {place}", reading.options, reading.sources)]


def cross_check(parts: Parts, env: Mapping[str, str], proxy_port: int | None) -> list[str]:
    """Warnings; OptionError where two parts contradict each other."""
    warnings: list[str] = []
    for path, meta in parts.meta.items():
        warnings += check_meta(meta, path, proxy_port)
        if meta.lease_ttl_ms is not None:
            warnings += check_lease(meta.lease_ttl_ms, env, parts.load_timeout_ms, "ock.mmc.meta.lease_ttl_ms", path)
        for local_path, local in parts.local.items():
            check_pair(local, meta, local_path)
    check_locals(list(parts.local.items()))
    for where, flags in parts.masters.items():
        for path, client in parts.mooncake.items():
            warnings += check_master(flags, client, path, env, load_timeout_ms=parts.load_timeout_ms, where=where)
    check_workers(list(parts.workers.items()), list(parts.yuanrong.items()))
    return warnings
