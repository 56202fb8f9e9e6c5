"""Reads mappings into typed, frozen models: unknown keys become warnings, wrong values become one OptionError."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from kvpool.options.errors import OptionError
from kvpool.options.scalars import Form

DEFAULT = "default"
JSON = "JSON"


class OptionModel(BaseModel):
    """Base of all option models: frozen; every field carries a Form and a description. Keys of the input are field aliases."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Key as the operator writes it -> name of the field."""
        return {info.alias or name: name for name, info in cls.model_fields.items()}


M = TypeVar("M", bound=OptionModel)


@dataclass(frozen=True, slots=True)
class Reading(Generic[M]):
    """A parsed mapping; ``sources`` says for every field where its value came from."""

    options: M
    warnings: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


def accepted_form(info: FieldInfo) -> str:
    """The accepted form of a field, in words."""
    forms = [item.accepted for item in info.metadata if isinstance(item, Form)]
    return forms[0] if forms else "another value"


def located(where: str, line: str) -> str:
    """A message with the place it is about in front, if there is one."""
    return f"{where}: {line}" if where else line


def unknown_key(key: str, known: Collection[str], where: str = "", *, fate: str = "is ignored") -> str:
    """The warning for a key that nobody reads; ``fate`` is what becomes of it."""
    near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see docs/configuration.md for the known keys"
    return located(where, f"unknown key {key!r} {fate}: {hint}")


def read_fields(
    model: type[M],
    raw: Mapping[str, object],
    *,
    origin: str = JSON,
    where: str = "",
    internal: Collection[str] = (),
    fills: Mapping[str, object] | None = None,
    fill_sources: Mapping[str, str] | None = None,
) -> Reading[M]:
    """Parse ``raw``. A null is the default. Fields in ``internal`` are never read from ``raw``.

    ``fills`` are values (by key) from elsewhere that win over ``raw``; ``fill_sources`` says where they came from.
    """
    keys = {key: name for key, name in model.keys().items() if name not in internal}
    warnings = [unknown_key(key, keys, where) for key in raw if key not in keys]
    given = {key: value for key, value in raw.items() if key in keys and value is not None}
    values: dict[str, Any] = {**given, **(fills or {})}
    try:
        options = model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        info = model.model_fields[model.keys().get(key, key)]
        place = (fill_sources or {}).get(key, where)
        if first["type"] == "missing":
            raise OptionError(key, None, f"is required: {accepted_form(info)}", where=where) from None
        raise OptionError(key, values[key], f"expected {accepted_form(info)}", where=place) from None
    sources = {name: origin if key in given else DEFAULT for key, name in model.keys().items()}
    sources |= {model.keys()[key]: source for key, source in (fill_sources or {}).items()}
    return Reading(options, warnings, sources)
