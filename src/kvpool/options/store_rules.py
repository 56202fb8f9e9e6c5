"""How the options of the connector, the backend's own file and the environment depend on one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvpool.options.addresses import is_wildcard, only_here
from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.backend_file import BackendFile
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel
from kvpool.options.lease import default_transfer_ms, timeouts_ms
from kvpool.options.memcache_conf import LocalConf
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.mooncake_rules import LISTENS
from kvpool.options.resources import check_resources, engine_line
from kvpool.options.yuanrong_json import YuanrongOptions


class Found(NamedTuple):
    """``notes`` are facts that the operator should see once at start, without being asked to do anything."""

    warnings: list[str]
    notes: list[str]


def check_store(options: AscendStoreOptions, backend_file: BackendFile | None, env: Mapping[str, str]) -> Found:
    """Warnings and notes; OptionError for what cannot work. ``env`` is the environment that the store will see."""
    conf = backend_file.options if backend_file is not None else None
    if isinstance(conf, YuanrongOptions) and conf.get_sub_timeout_ms > options.load_timeout_ms:
        reason = f"is longer than load_timeout_ms={options.load_timeout_ms}: a load would be given up while the store still waits"
        raise OptionError("get_sub_timeout_ms", conf.get_sub_timeout_ms, reason, where=backend_file.path if backend_file else "")
    return Found([], []) if conf is None else check_conf(conf, env)


def check_conf(conf: OptionModel, env: Mapping[str, str]) -> Found:
    """The same for a file alone."""
    if isinstance(conf, LocalConf) and conf.hcom_url is not None and (is_wildcard(conf.hcom_url) or not only_here(conf.hcom_url)):
        return Found(
            [], [f"memcache: this process listens on {conf.hcom_url} for other hosts: the pool belongs into a private network"]
        )
    if not isinstance(conf, MooncakeOptions):
        return Found([], [])
    if conf.protocol == "ascend":
        timeouts_ms(env)
        default_transfer_ms(env)
    return Found(check_resources(env), [engine_line(conf, env), LISTENS])
