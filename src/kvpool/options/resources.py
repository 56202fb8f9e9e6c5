"""ASCEND_GLOBAL_RESOURCE_CONFIG: types of its known fields, and which traffic each governs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from kvpool.options.environment import RESOURCE_CONFIG, resource_config
from kvpool.options.errors import OptionError
from kvpool.options.fields import OptionModel, Reading, read_fields
from kvpool.options.mooncake_json import MooncakeOptions
from kvpool.options.scalars import PORT, Form, integer

PD, STORE, BOTH = "prefill-to-decode traffic", "store traffic", "all traffic of the process"
CAPACITY = "fabric_memory.max_capacity"


def _read_protocols(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError
    for item in value:
        kind, colon, place = item.partition(":") if isinstance(item, str) else ("", "", "")
        if not (kind.isalnum() and colon and place in ("device", "host")):
            raise ValueError
    return tuple(value)


Protocols = Annotated[
    tuple[str, ...] | None, Form('a list of "<protocol>:device" or "<protocol>:host", as ["roce:device"]', _read_protocols)
]


class ResourceFields(OptionModel):
    """The fields that are known; others go to HIXL unchecked."""

    protocol: Protocols = Field(
        None,
        alias="comm_resource_config.protocol_desc",
        description=f"Links of {PD}, of MooncakeConnectorV1.",
    )
    store_protocol: Protocols = Field(
        None, alias="store.comm_resource_config.protocol_desc", description=f"Links of {STORE}. Needs CANN >= 9.1.0."
    )
    listen_port: Annotated[int | None, PORT] = Field(
        None, alias="comm_resource_config.listen_port", description=f"Listening port ({PD}); HIXL takes 16666 where it is unset."
    )
    store_listen_port: Annotated[int | None, PORT] = Field(
        None, alias="store.comm_resource_config.listen_port", description=f"Listening port ({STORE})."
    )
    store_qos: Annotated[int | None, integer(0, 4)] = Field(
        None, alias="store.comm_resource_config.qos", description=f"Priority of {STORE}; qos_priority wins over it."
    )
    max_capacity: Annotated[int | None, integer(1)] = Field(
        None, alias="fabric_memory.max_capacity", description=f"Quota of fabric memory in GB per process ({BOTH})."
    )


def traffic(key: str) -> str:
    """Which traffic a field governs; "" for fields that are not known."""
    known = ResourceFields.keys()
    if key not in known:
        return ""
    return STORE if key.startswith("store.") else BOTH if key == CAPACITY else PD


def read_resources(env: Mapping[str, str]) -> Reading[ResourceFields]:
    """The known fields; OptionError naming the field where its type is wrong, a warning for what looks like a slip of one."""
    raw = resource_config(env)
    known = ResourceFields.keys()
    reading = read_fields(
        ResourceFields,
        {key: value for key, value in raw.items() if key in known},
        origin=f"environment {RESOURCE_CONFIG}",
        where=RESOURCE_CONFIG,
    )
    warnings = []
    for key in raw:
        if key not in known and (near := difflib.get_close_matches(key, list(known), n=1, cutoff=0.85)):
            warnings.append(f"{RESOURCE_CONFIG}: unknown field {key!r} goes to HIXL unchecked: did you mean {near[0]}?")
    return Reading(reading.options, warnings, reading.sources)


def check_resources(env: Mapping[str, str]) -> list[str]:
    """Like ``read_resources``, for a start: text that is no JSON object is not judged here (``merge_qos`` warns of it)."""
    try:
        resource_config(env)
    except OptionError:
        return []
    return read_resources(env).warnings


def engine_line(options: MooncakeOptions, env: Mapping[str, str]) -> str:
    """One line: the store shares its transfer engine with nobody, and which fields are for it."""
    line = f"mooncake: the store has a transfer engine of its own (protocol {options.protocol})"
    if options.protocol != "ascend" or not env.get(RESOURCE_CONFIG):
        return line
    return f"{line}; of {RESOURCE_CONFIG} its store. fields are meant for it"
