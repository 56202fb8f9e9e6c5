"""Reads the configuration file of the chosen backend, and only that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.options.ascend_store import BackendName
from kvpool.options.backend import CONFIG_VARIABLE
from kvpool.options.configfile import read_text
from kvpool.options.deployment import Deployment
from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import OptionModel
from kvpool.options.memcache_conf import read_local_conf
from kvpool.options.memcache_rules import check_local
from kvpool.options.mooncake_json import read_mooncake
from kvpool.options.reach import check_reach
from kvpool.options.yuanrong_json import read_yuanrong


@dataclass(frozen=True, slots=True)
class BackendFile:
    """A backend's own configuration: where it lies ("" where the environment is all there is), what it says, with which sources."""

    backend: str
    path: str
    options: OptionModel
    warnings: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


def read_backend_file(
    backend: BackendName, env: Mapping[str, str], deployment: Deployment, *, use_layerwise: bool | None = None
) -> BackendFile | None:
    """The parsed file of ``backend``; None for local. OptionError naming the variable where it is missing, and for a
    store that does not reach the device."""
    check_reach(backend, deployment.device)
    variable = CONFIG_VARIABLE.get(backend)
    if variable is None:
        return None
    path = env.get(variable, "")
    if not path:
        if backend == "yuanrong" and env.get("DS_WORKER_ADDR"):
            return parse_backend_file(backend, "", "{}", env, deployment, use_layerwise=use_layerwise)
        raise OptionError(variable, UNSET, _missing(backend, deployment))
    return parse_backend_file(backend, path, read_text(path, variable), env, deployment, use_layerwise=use_layerwise)


def parse_backend_file(
    backend: str, path: str, text: str, env: Mapping[str, str], deployment: Deployment, *, use_layerwise: bool | None = None
) -> BackendFile:
    """Parse ``text``, which lies at ``path``. ``use_layerwise`` is the connector's, where there is one."""
    if backend == "mooncake":
        mooncake = read_mooncake(text, path, env, deployment)
        return BackendFile(backend, path, mooncake.options, mooncake.warnings, mooncake.sources)
    if backend == "memcache":
        local = read_local_conf(text, path)
        warnings = local.warnings + check_local(local.options, path, env, deployment)
        return BackendFile(backend, path, local.options, warnings, local.sources)
    yuanrong = read_yuanrong(text, path, env, deployment, use_layerwise=use_layerwise)
    return BackendFile(backend, path, yuanrong.options, yuanrong.warnings, yuanrong.sources)


def _missing(backend: str, deployment: Deployment) -> str:
    """What to say where the variable with the path of the file is not set."""
    also = " (or DS_WORKER_ADDR)" if backend == "yuanrong" else ""
    reason = f"is not set{also}: the {backend} backend needs the path of its configuration file"
    if backend != "memcache":
        return reason
    package = deployment.host.package_folder("memcache_hybrid")
    place = f"{package}/config" if package else "the folder config of the package memcache_hybrid, which is not installed here"
    return f"{reason}; a file to start from is mmc-local.conf in {place}"
