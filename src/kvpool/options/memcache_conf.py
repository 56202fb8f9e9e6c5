"""mmc-local.conf and mmc-meta.conf: `key = value` lines. The library reads them; we check what it would refuse late."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from kvpool.options.errors import UNSET, OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields, unknown_key
from kvpool.options.scalars import Bool, Form, choice, integer, read_address, size, text

_SCHEMES = ("tcp", "tls", "http", "https")


def _read_url(value: object) -> str:
    scheme, separator, address = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not separator or scheme not in _SCHEMES or re.search(r"\s", address):
        raise ValueError
    return f"{scheme}://{read_address(address)}"


URL = Form("<scheme>://<host>:<port>", _read_url)
LOCAL = "ock.mmc.local_service"
PROTOCOLS = ("device_rdma", "device_sdma", "device_urma", "device_uboe", "host_rdma", "host_urma", "host_tcp", "host_shm")
LogLevel = Annotated[str, choice("debug", "info", "warn", "error")]
Percent = Annotated[int | None, integer(1, 100)]
PASSED_ON = re.compile(
    r"ock\.mmc\.(?:.*tls.*|log_.*|client\..*|local_service\.(?:.*hbm\.size|.*tls.*)|meta\..*|meta_service\..*)|ubsio\..*"
)
"""Further keys of the library, which it checks itself."""

M = TypeVar("M", bound=OptionModel)


class LocalConf(OptionModel):
    """mmc-local.conf: the client in each vLLM process, or a standalone process that gives memory."""

    meta_service_url: Annotated[str, URL] = Field(
        alias="ock.mmc.meta_service_url", description="The meta service; the same on all nodes."
    )
    config_store_url: Annotated[str, URL] = Field(
        alias="ock.mmc.local_service.config_store_url", description="Must equal that of mmc-meta.conf."
    )
    log_level: LogLevel = Field("error", alias="ock.mmc.log_level", description="Of the library.")
    hcom_url: Annotated[str | None, URL] = Field(
        None, alias="ock.mmc.local_service.hcom_url", description="Where this process listens with a host_ protocol."
    )
    world_size: Annotated[int, integer(1)] = Field(
        256, alias="ock.mmc.local_service.world_size", description="Most local services there will ever be."
    )
    protocol: Annotated[str, choice(*PROTOCOLS)] = Field(
        "host_rdma",
        alias="ock.mmc.local_service.protocol",
        description="device_sdma (A3 with HCCS), device_rdma (RoCE), device_urma, device_uboe or a host_ one.",
    )
    dram_size: Annotated[int | None, size()] = Field(
        None,
        alias="ock.mmc.local_service.dram.size",
        description="Memory that this process gives; 0GB gives nothing but reads and writes.",
    )
    max_dram_size: Annotated[int | None, size()] = Field(
        None,
        alias="ock.mmc.local_service.max.dram.size",
        description="Largest dram.size of any process; not smaller than dram.size.",
    )
    storage_enabled: Bool = Field(
        False, alias="ock.mmc.local_service.storage.enabled", description="SSD tier (UBS IO). Handed to the library; not run by us."
    )
    disk_path: Annotated[str | None, text("absolute device paths, separated by colons", r"/[^\s:]+(?::/[^\s:]+)*")] = Field(
        None, alias="ubsio.disk.path", description="Block devices of the SSD tier; needed when it is on."
    )
    ubsio_memory_gb: Annotated[int, integer(0, 3072)] = Field(
        10, alias="ubsio.mem.size_in_gb", description="Memory of the SSD tier per process in GB; at least 5 when it is on."
    )
    device_count: Annotated[int | None, integer(1)] = Field(
        None,
        alias="ubsio.standalone.device_count",
        description="Local services of this host whose dram.size is not 0; needed with the SSD tier.",
    )
    force_new_disk: Bool = Field(True, alias="ubsio.standalone.force_new_disk", description="Treat the devices as new ones.")


class MetaConf(OptionModel):
    """mmc-meta.conf: the meta service."""

    meta_service_url: Annotated[str, URL] = Field(alias="ock.mmc.meta_service_url", description="Where it listens.")
    config_store_url: Annotated[str, URL] = Field(
        alias="ock.mmc.meta_service.config_store_url", description="Where its configuration store listens."
    )
    metrics_url: Annotated[str | None, URL] = Field(
        None,
        alias="ock.mmc.meta_service.metrics_url",
        description="Where its metrics are served; the library takes http://127.0.0.1:8000 where it is unset.",
    )
    log_level: LogLevel = Field("error", alias="ock.mmc.log_level", description="Of the library.")
    lease_ttl_ms: Annotated[int | None, integer(1)] = Field(None, alias="ock.mmc.meta.lease_ttl_ms", description="Lease of a read.")
    evict_threshold_high: Percent = Field(
        None, alias="ock.mmc.evict_threshold_high", description="Percent at which eviction starts."
    )
    evict_threshold_low: Percent = Field(None, alias="ock.mmc.evict_threshold_low", description="Percent at which it ends.")
    rewarm_watermark: Percent = Field(
        None, alias="ock.mmc.rewarm.dram_watermark", description="Percent up to which SSD hits return."
    )


def parse_conf(content: str, path: str, *, fix: bool = False) -> dict[str, str]:
    """Keys and values. Only whole-line comments are comments: the library takes what follows a value as part of it.

    With ``fix``, comments after a value are cut off instead of refused.
    """
    pairs: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in stripped.partition("="))
        if not equals or not key:
            raise OptionError(f"line {number}", UNSET, f"expected key = value, found {stripped!r}", where=path)
        if re.search(r"(?:^|\s)#", value):
            if not fix:
                reason = (
                    f"comment after the value of {key}, which the library takes as part of it "
                    "(`kvpool config check --fix OUT` removes it)"
                )
                raise OptionError(f"line {number}", UNSET, reason, where=path)
            value = re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()
        if key in pairs:
            raise OptionError(f"line {number}", UNSET, f"{key} appears twice", where=path)
        pairs[key] = value
    return pairs


def clean_conf(content: str, path: str) -> tuple[str, list[str]]:
    """The file without comments after values, and a line for each that was removed."""
    parse_conf(content, path, fix=True)
    kept: list[str] = []
    removed: list[str] = []
    for number, line in enumerate(content.splitlines(), start=1):
        match = None if line.lstrip().startswith("#") else re.search(r"\s#.*$", line)
        kept.append(line[: match.start()].rstrip() if match else line)
        if match:
            removed.append(f"{path}: line {number}: removed a comment")
    return "\n".join(kept) + "\n", removed


def _read_conf(model: type[M], content: str, path: str) -> Reading[M]:
    pairs = {key: value for key, value in parse_conf(content, path).items() if value != ""}
    known = model.keys()
    ours = {key: value for key, value in pairs.items() if key in known}
    reading = read_fields(model, ours, origin=f"file {path}", where=path)
    strange = [
        unknown_key(key, known, path, fate="goes to the library unchecked")
        for key in pairs
        if key not in known and not PASSED_ON.fullmatch(key)
    ]
    return Reading(reading.options, reading.warnings + strange, reading.sources)


def read_local_conf(content: str, path: str) -> Reading[LocalConf]:
    """mmc-local.conf; OptionError naming file, key and accepted form."""
    reading = _read_conf(LocalConf, content, path)
    options = reading.options
    if options.dram_size is not None and options.max_dram_size is not None and options.dram_size > options.max_dram_size:
        raise OptionError(
            f"{LOCAL}.dram.size", options.dram_size, f"is larger than max.dram.size={options.max_dram_size}", where=path
        )
    return reading


def read_meta_conf(content: str, path: str) -> Reading[MetaConf]:
    """mmc-meta.conf; OptionError naming file, key and accepted form."""
    reading = _read_conf(MetaConf, content, path)
    low, high = reading.options.evict_threshold_low, reading.options.evict_threshold_high
    if low is not None and high is not None and low >= high:
        raise OptionError("ock.mmc.evict_threshold_low", low, f"must be below evict_threshold_high={high}", where=path)
    return reading


def conf_kind(pairs: dict[str, str]) -> Literal["local", "meta"]:
    """Which of the two files these keys belong to."""
    return "local" if any(key.startswith(f"{LOCAL}.") for key in pairs) else "meta"
