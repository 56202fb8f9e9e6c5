"""Strict JSON with errors that name file, line and reason, and the cleaning of three slips that hand-written files have.

The slips are comments (``#`` or ``//``), text in parentheses after a value, and trailing commas. They are refused when read (other
readers of the same file refuse them too) and removed by ``clean``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from kvpool.options.errors import UNSET, OptionError

_TOKEN = re.compile(
    r"""(?P<blank>\s+)|(?P<comment>(?:\#|//)[^\n]*)|(?P<prose>\([^()\n]*\))|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<other>.)"""
)
"""Text outside strings is split into single characters: only comments, text in parentheses and commas are of interest."""


class JsonError(OptionError):
    """A text that is not the JSON it should be; ``line`` and ``column`` count from 1."""

    def __init__(self, source: str, text: str, position: int, problem: str) -> None:
        self.line = text.count("\n", 0, position) + 1
        self.column = position - (text.rfind("\n", 0, position) + 1) + 1
        self.problem = problem
        super().__init__(f"line {self.line}", UNSET, problem, where=source)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {key!r} appears twice")
        seen[key] = value
    return seen


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def read_json(text: str, source: str) -> dict[str, Any]:
    """The object that ``text`` holds. JsonError for anything else, duplicate keys and NaN included."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _diagnosed(text, source, error) from None
    except (ValueError, RecursionError) as error:
        raise JsonError(source, text, 0, str(error)) from None
    if not isinstance(value, dict):
        raise JsonError(source, text, 0, "expected an object, { … }")
    return value


def _diagnosed(text: str, source: str, error: json.JSONDecodeError) -> JsonError:
    """The first slip if there is one at or before the error, else what the parser says."""
    for position, slip in _scan(text)[1]:
        if position <= error.pos:
            return JsonError(source, text, position, f"{slip} is not JSON (`kvpool config check --fix OUT` removes it)")
    return JsonError(source, text, error.pos, error.msg)


def _scan(text: str) -> tuple[str, list[tuple[int, str]]]:
    """The text without slips (its line breaks stay), and each slip with its position.

    Anything else after a value (an unquoted `10 GB`) may be part of the value and is never removed.
    """
    kept: list[str] = []
    slips: list[tuple[int, str]] = []
    comma: tuple[int, int] | None = None  # index in ``kept`` and position of a comma with nothing after it yet
    for match in _TOKEN.finditer(text):
        token, kind = match.group(), match.lastgroup
        if kind in ("comment", "prose"):
            slips.append((match.start(), "a comment" if kind == "comment" else f"the text {token!r}"))
            continue
        if token in ("}", "]") and comma is not None:
            slips.append((comma[1], "a comma before the closing bracket"))
            kept[comma[0]] = ""
        kept.append(token)
        if kind != "blank":
            comma = (len(kept) - 1, match.start()) if token == "," else None
    return "".join(kept), slips


def clean(text: str, source: str) -> tuple[str, list[str]]:
    """``text`` as plain JSON, laid out anew, and a line for each slip that was removed; JsonError where that is not enough."""
    fixed, slips = _scan(text)
    value = read_json(fixed, f"{source} (after cleaning)" if slips else source)
    removed = [f"{source}: line {text.count(chr(10), 0, position) + 1}: removed {slip}" for position, slip in slips]
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n", removed
