"""What a launch is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from kvpool.devices import device_of
from kvpool.options.ascend_store import BACKENDS, BackendName
from kvpool.options.errors import OptionError
from kvpool.options.reach import check_reach
from kvpool.options.secret import shared_secret

Mode = Literal["mixed", "pd", "separated"]
MODES: tuple[Mode, ...] = get_args(Mode)
LaunchDevice = Literal["cpu", "cuda"]
DEVICES: tuple[LaunchDevice, ...] = get_args(LaunchDevice)
OURS = {
    "--model": "--model",
    "--port": "--port",
    "--host": "--host",
    "--served-model-name": "--served-model-name",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--kv-cache-memory-bytes": "--kv-cache",
    "--kv-transfer-config": "",
    "--data-parallel-size": "",
    "-dp": "",
    "--pipeline-parallel-size": "",
    "-pp": "",
}
"""Arguments of an engine that a launch sets itself, and by which option; "": by none."""
CONFIG_FILES = ("config.json", "params.json")  # the second is Mistral's own format, which vLLM reads too


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """``port`` is where requests go; ports that are None are chosen. Sizes in bytes: ``dram`` is the pool, ``kv_cache`` each
    engine rank's own cache (None: vLLM decides). ``pool`` names a local pool that stays. ``engine_args`` go to every engine."""

    mode: Mode
    model: str
    backend: BackendName = "local"
    device: LaunchDevice = "cpu"
    host: str = "127.0.0.1"
    port: int | None = None
    prefill_port: int | None = None
    decode_port: int | None = None
    kv_port: int | None = None
    tp: int = 1
    dram: int = 4 << 30
    kv_cache: int | None = None
    pool: str | None = None
    served_name: str | None = None
    engine_args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.served_name or self.model

    @property
    def engines(self) -> tuple[str, ...]:
        return ("prefill", "decode") if self.mode == "pd" else ("engine",)

    @property
    def port_flags(self) -> dict[str, int | None]:
        """The ports that this mode needs, by flag; None: to be chosen."""
        needed: dict[str, int | None] = {"--port": self.port}
        if self.mode == "pd":
            needed |= {"--prefill-port": self.prefill_port, "--decode-port": self.decode_port, "--kv-port": self.kv_port}
        return needed


def default_backend(mode: Mode, device: str) -> BackendName:
    """The local store where it can be; it has no owner of its own, and reaches host memory only."""
    return "local" if device == "cpu" and mode != "separated" else "mooncake"


def check(options: LaunchOptions) -> None:
    """OptionError, in one line, for what must not start."""
    check_common(options.mode, options.engine_args)
    _check_model(options.model)
    if options.mode == "pd":
        shared_secret(os.environ)
    if options.device not in DEVICES:
        reason = f"accepted: {', '.join(DEVICES)}; for an NPU host take the files that --series a2, a3 or a5 prints"
        raise OptionError("--device", options.device, reason)
    if options.backend not in BACKENDS:
        raise OptionError("--backend", options.backend, f"accepted: {', '.join(BACKENDS)}")
    if options.backend == "local" and options.mode == "separated":
        reason = "has no process that owns the memory: it outlives engines by itself; accepted: mooncake, memcache, yuanrong"
        raise OptionError("--backend", "local", reason)
    check_reach(options.backend, options.device, "--backend")
    if options.pool is not None and options.backend != "local":
        raise OptionError("--pool", options.pool, f"names a pool of the local store, but the store is {options.backend}")
    _check_ports(options)
    try:
        device_of(options.device)
    except ValueError:
        raise OptionError("--device", options.device, "this version runs engines on CPUs only: give --device cpu") from None


def check_common(mode: str, engine_args: tuple[str, ...]) -> None:
    """What holds for files of production hosts too."""
    if mode not in MODES:
        raise OptionError("MODE", mode, f"accepted: {', '.join(MODES)}")
    for word in engine_args:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in OURS:
            ours = OURS[flag]
            raise OptionError(flag, word, f"is set by the launch: use {ours} before --" if ours else "is set by the launch")


def _check_model(model: str) -> None:
    """A hub's name is for vLLM to judge; for a path that leads to no model an engine would take half a minute to say so."""
    accepted = "accepted: a folder with config.json, or a name on the hub, as owner/name"
    if os.path.isdir(model):
        if not any(os.path.isfile(os.path.join(model, name)) for name in CONFIG_FILES):
            raise OptionError("--model", model, f"is a folder without config.json; {accepted}")
    elif _is_path(model) and not os.path.isfile(model):
        raise OptionError("--model", model, f"is no folder of this host; {accepted}")


def _is_path(model: str) -> bool:
    """Whether it cannot be a name on a hub. (Addresses, as s3://…, are vLLM's.)"""
    if "://" in model:
        return False
    return not model.strip() or model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _check_ports(options: LaunchOptions) -> None:
    given = {"--prefill-port": options.prefill_port, "--decode-port": options.decode_port, "--kv-port": options.kv_port}
    seen: dict[int, str] = {}
    for flag, port in {"--port": options.port, **given}.items():
        if port is None:
            continue
        if flag not in options.port_flags:
            raise OptionError(flag, port, f"there is no such port in mode {options.mode}")
        if port in seen:
            raise OptionError(flag, port, f"is that of {seen[port]} already")
        seen[port] = flag
