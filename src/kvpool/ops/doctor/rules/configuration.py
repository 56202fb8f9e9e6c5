"""What the option rules say of the given configuration: the same lines as at start, and from `kvpool config check`."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.ops.doctor.finding import Check, Finding

AREA = "configuration"
SOUND = Check(AREA, "options", "everything that `kvpool config check` looks at")
ROLE = Check(AREA, "role", "--role is the kv_role of the given configuration", "both are given")
CHECKS = (SOUND, ROLE)

FIX = "correct it as the line says; docs/stores/mistakes.md explains every line"


def judge_configuration(error: str, warnings: Sequence[str]) -> list[Finding]:
    """``error`` is why it would be refused, "" where it would not."""
    needed = "a configuration that starts"
    found = [SOUND.failure(error, needed, FIX)] if error else []
    found += [SOUND.warning(line, needed, FIX) for line in warnings]
    return found or [SOUND.ok("nothing to say")]


def judge_role(asked: str | None, kv_role: object, expected: str) -> list[Finding]:
    """``expected`` is the kv_role of the role that was asked for."""
    if asked is None or kv_role is None:
        return []
    if kv_role != expected:
        fix = f'give the configuration of this role, or "kv_role": "{expected}"'
        return [ROLE.failure(f"kv_role is {kv_role}", f"{expected} (--role {asked})", fix)]
    return [ROLE.ok(f"kv_role is {kv_role}")]
