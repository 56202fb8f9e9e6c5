"""How yuanrong.json depends on the environment and the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool.options.addresses import check_reachable, is_wildcard
from kvpool.options.deployment import Deployment
from kvpool.options.errors import UNSET, OptionError

if TYPE_CHECKING:
    from kvpool.options.yuanrong_json import YuanrongOptions

LINK_TYPE = "DS_RH2D_LINK_TYPE"
LOG_FOLDER = "DATASYSTEM_CLIENT_LOG_DIR"


def check_yuanrong(options: YuanrongOptions, path: str, env: Mapping[str, str], deployment: Deployment) -> list[str]:
    """Warnings; OptionError for what cannot work."""
    if is_wildcard(options.worker_addr):
        reason = "is a wildcard, on which nobody can be reached: give the --worker_address of this host's worker"
        raise OptionError("worker_addr", options.worker_addr, reason, where=path)
    check_reachable("worker_addr", options.worker_addr, deployment, path)
    if options.enable_remote_h2d:
        _check_link(options, path, env)
    return _check_logs(env, deployment)


def _check_link(options: YuanrongOptions, path: str, env: Mapping[str, str]) -> None:
    """HIXL goes over HCCS, and its clients must say so; P2P_TRANSFER over ROCE, which is what unset means."""
    link = env.get(LINK_TYPE, "")
    if link not in ("", "HCCS", "ROCE"):
        raise OptionError(LINK_TYPE, link, "expected HCCS or ROCE, in capitals")
    transport = options.remote_h2d_transport_backend
    if transport == "HIXL" and link != "HCCS":
        reason = "must be HCCS, as on the workers, since remote_h2d_transport_backend is HIXL"
        raise OptionError(LINK_TYPE, link or UNSET, reason, where=path)
    if transport == "P2P_TRANSFER" and link == "HCCS":
        reason = "must be ROCE or unset, since remote_h2d_transport_backend is P2P_TRANSFER"
        raise OptionError(LINK_TYPE, link, reason, where=path)


def remote_h2d_obstacle(options: YuanrongOptions, deployment: Deployment) -> str:
    """Why remote H2D cannot work on this host, as far as that shows; the client then goes without it."""
    if not options.enable_remote_h2d:
        return ""
    if deployment.device in ("cpu", "cuda"):
        return f"the KV lies on {deployment.device}, not on an NPU"
    if deployment.device == "npu" and deployment.host.huge_pages() == 0:
        return "this host has no huge pages of 2 MiB reserved"
    return ""


def log_folder(env: Mapping[str, str]) -> str:
    """Where the client writes its logs; to be made before its library is imported, which reads it then."""
    return env.get(LOG_FOLDER) or os.path.expanduser("~/.datasystem/logs")


def _check_logs(env: Mapping[str, str], deployment: Deployment) -> list[str]:
    folder = env.get(LOG_FOLDER)
    if not folder:
        return []
    if not folder.startswith("/"):
        raise OptionError(LOG_FOLDER, folder, "expected an absolute path")
    if deployment.host.can_make(folder):
        return []
    return [f"{LOG_FOLDER}={folder} is not writable and cannot be made: the client will not log"]
