"""Strict readings of single values. Every rule is stated once, here, and holds for JSON, files and environment alike.

A ``Form`` is the accepted form in words plus the reading; put into ``Annotated[...]`` it is the validator of a field and the text
of its row in docs/configuration.md. A reading raises ValueError without text: the caller knows key, value and accepted form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Generic, TypeVar

from pydantic_core import CoreSchema, core_schema

_TRUE_FALSE = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([KMGT]?B)?", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,12})(ms|s|m|h)?", re.ASCII)
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
MAX_SIZE = 2**63 - 1
T = TypeVar("T")
SIZE_FORM = 'bytes as an integer or a number with a unit B, KB, MB, GB or TB (powers of 1024), as 1073741824, "1GB" or "1.5 GB"'


class Form(Generic[T]):
    """What a value may look like."""

    def __init__(self, accepted: str, read: Callable[[object], T]) -> None:
        self.accepted = accepted
        self.read = read

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


def read_bool(value: object) -> bool:
    """true, false, 1, 0, and these four as strings in any case; nothing else is ever true."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _TRUE_FALSE:
        return _TRUE_FALSE[value.strip().lower()]
    raise ValueError


def read_int(value: object) -> int:
    """Integers and strings of decimal digits; no booleans, no floats (not even 1.0), no digits beyond ASCII."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise ValueError


def read_size(value: object) -> int:
    """Bytes. One rule for every size: see ``SIZE_FORM``. A fraction needs a unit; parts of a byte are cut off.

    "1G" and "1GiB" are refused (which power they mean depends on who reads them), and so are exponents, signs and floats.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number, unit = match.groups()
        if unit is None and "." in number:
            raise ValueError
        size = int(Decimal(number) * _UNITS[(unit or "B").upper()])
    else:
        raise ValueError
    if not 0 <= size <= MAX_SIZE:
        raise ValueError
    return size


def read_duration(value: object) -> int:
    """Milliseconds, at least 1: a number of them, or one with ms, s, m or h."""
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or not (milliseconds := int(match[1]) * _MILLISECONDS[match[2] or "ms"]):
        raise ValueError
    return milliseconds


def integer(low: int, high: int | None = None) -> Form[int]:
    """An integer from ``low`` to ``high``, both included."""

    def read(value: object) -> int:
        number = read_int(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    return Form(f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}", read)


def size(low: int = 0, *, text: str = "") -> Form[int]:
    """A size of at least ``low`` bytes; ``text`` says the bound in words."""

    def read(value: object) -> int:
        number = read_size(value)
        if number < low:
            raise ValueError
        return number

    return Form(SIZE_FORM + text, read)


def choice(*names: str) -> Form[str]:
    """One of ``names``; blanks around it and its case do not matter, the result is spelled as in ``names``."""
    known = {name.lower(): name for name in names}

    def read(value: object) -> str:
        if isinstance(value, str) and value.strip().lower() in known:
            return known[value.strip().lower()]
        raise ValueError

    return Form("one of " + ", ".join(f'"{name}"' for name in names), read)


def name(accepted: str = "1 to 64 characters out of A-Z a-z 0-9 . _ -, the first neither . nor -") -> Form[str]:
    """A name that is safe as a file name and inside a key."""

    def read(value: object) -> str:
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", value, re.ASCII):
            return value
        raise ValueError

    return Form(accepted, read)


def text(accepted: str, pattern: str = r"[^\x00-\x1f]+") -> Form[str]:
    """A string that matches ``pattern`` as a whole."""
    compiled = re.compile(pattern)

    def read(value: object) -> str:
        if isinstance(value, str) and compiled.fullmatch(value):
            return value
        raise ValueError

    return Form(accepted, read)


def read_label(value: object) -> str | int:
    """A string or an integer, kept as it is."""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError


def read_partition(value: object) -> tuple[int, ...]:
    """Layers per pipeline stage, "30,31" or [30, 31]."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise ValueError
    layers = tuple(read_int(part) for part in parts)
    if min(layers) < 1:
        raise ValueError
    return layers


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; ValueError where it is neither or the port is not in 1..65535."""
    host, colon, port = address.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host.strip("[]") or re.search(r"\s", host) or (":" in host and not bracketed):
        raise ValueError
    number = read_int(port)
    if not 1 <= number <= 65535:
        raise ValueError
    return host, number


def read_address(value: object) -> str:
    """ "host:port", kept as written without blanks around it."""
    if not isinstance(value, str):
        raise ValueError
    split_address(value)
    return value.strip()


ABSOLUTE_PATH = text("an absolute path", r"/[^\x00-\x1f]*")
PARTITION = Form('integers of at least 1, one per pipeline stage, as "30,31"', read_partition)

Bool = Annotated[bool, Form("true or false", read_bool)]
ADDRESS = Form('"<host>:<port>"', read_address)
PORT = integer(1, 65535)
Address = Annotated[str, ADDRESS]
Port = Annotated[int, PORT]
Milliseconds = Annotated[int, integer(1, 3_600_000)]
