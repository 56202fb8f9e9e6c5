"""Commands and variables as text that a shell takes, and that people can read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from kvpool.ops.launch.plan import Plan

_PLAIN = re.compile(r"-{1,2}[A-Za-z][\w-]*(=.*)?")


def exports(env: Mapping[str, str]) -> str:
    """One line for each variable."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def command_lines(command: Sequence[str]) -> str:
    """One line for each flag with its values."""
    lines: list[list[str]] = [[]]
    for word in command:
        if _PLAIN.fullmatch(word) and lines[-1] and word not in ("-m", "-c"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines) + "\n"


def shown_plan(plan: Plan) -> str:
    """What a launch would start. FOLDER, SHARED and SECRET stand for what only a launch makes."""
    parts = ["# FOLDER, SHARED (in shared memory) and SECRET are made at the start; the folders are gone at the end\n"]
    wanted = plan.service
    if wanted is not None:
        owned, shares = f"{wanted.owner_dram >> 20}MB by its owner", f"{wanted.engine_dram >> 20}MB by each engine rank"
        given = owned if wanted.owner_dram else shares
        parts.append(
            f"# pool service {wanted.backend}: the service of `kvpool store start {wanted.backend}`, memory: {given}.\n"
            "# It writes its files to FOLDER/service and gives the engines the variable that names them.\n"
        )
    for process in plan.processes:
        ports = ", ".join(f"{flag} {port}" for flag, port in process.ports.items())
        parts.append(f"# {process.name} ({ports}), ready when {process.ready} answers\n")
        parts.append(f"(\n{exports(process.env)}exec {command_lines(process.command)})\n")
    return "\n".join([*parts, f"# requests: {plan.url}/v1, model {plan.model}\n"])
