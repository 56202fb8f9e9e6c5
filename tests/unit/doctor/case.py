"""One case of a rule: what is wrong, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvpool.ops.doctor.finding import Check, Finding, Level
from kvpool.ops.doctor.need import Need

WARNING, FAILURE, UNKNOWN = Level.WARNING, Level.FAILURE, Level.UNKNOWN


class Case(NamedTuple):
    """``wrong`` has a finding of ``check`` at ``level`` whose words contain ``found`` and whose fix contains ``fix``; ``right`` has
    only good ones of it."""

    check: Check
    level: Level
    found: str
    fix: str
    wrong: list[Finding]
    right: list[Finding]


def case(
    check: Check,
    level: Level,
    found: str,
    fix: str,
    judge: Callable[..., list[Finding]],
    right: tuple[Any, ...],
    **changes: Any,
) -> Case:
    """``right`` are the arguments of ``judge``, a need last. A change replaces that field of the first argument that has it."""
    wrong = list(right)
    for key, value in changes.items():
        index = next(index for index, part in enumerate(wrong) if key in part.__dataclass_fields__)
        wrong[index] = replace(wrong[index], **{key: value})
    return Case(check, level, found, fix, judge(*wrong), judge(*right))


def env(need: Need, without: str = "", **more: str) -> Mapping[str, str]:
    return {key: value for key, value in need.env.items() if key != without} | more
