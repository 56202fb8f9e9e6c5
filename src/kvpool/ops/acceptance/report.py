"""What an acceptance run found, as one Markdown file: no prompts, no answers, no host names, no paths, no addresses."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import asdict, dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "not run"]
PARTS = ("conformance", "exactness", "faults", "kill list")
REASON_CHARS = 300
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*::?[0-9a-fA-F:]*\](?::\d+)?|\blocalhost:\d+"
)
_PATH = re.compile(r"(?<![\w/.<>-])~?/[\w.+@~-][^\s'\"),;]*")


@dataclass(frozen=True, slots=True)
class Check:
    """``reason``: how it failed, why it was not run, or what was seen. ``needed``: not having run it leaves the question open;
    False for what does not apply here and for what nobody asked for."""

    part: str
    name: str
    status: Status
    seconds: float
    reason: str = ""
    needed: bool = True


@dataclass(slots=True)
class Report:
    """``facts``: versions and machine, in the order in which they are shown."""

    facts: dict[str, str]
    checks: list[Check] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: all passed; 1: a check failed; 2: none failed, but one could not be run."""
        if any(check.status == "failed" for check in self.checks):
            return 1
        ran = any(check.status == "passed" for check in self.checks)
        return 0 if ran and not any(check.status == "not run" and check.needed for check in self.checks) else 2

    @property
    def verdict(self) -> str:
        """One line."""
        count = {status: sum(check.status == status for check in self.checks) for status in ("passed", "failed", "not run")}
        return f"{count['passed']} passed, {count['failed']} failed, {count['not run']} not run"

    def markdown(self) -> str:
        words = {0: "passed", 1: "failed", 2: "not complete"}[self.exit_code]
        lines = [f"# Acceptance: {words}", "", f"{self.verdict}. Made by `kvpool acceptance`.", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self.facts.items()]
        for part in dict.fromkeys(check.part for check in self.checks):
            lines += ["", f"## {part.capitalize()}", "", "| check | result | seconds | |", "|---|---|---:|---|"]
            lines += [
                f"| {_cell(check.name)} | {_shown(check.status)} | {check.seconds:.1f} | {_cell(check.reason)} |"
                for check in self.checks
                if check.part == part
            ]
        return "\n".join([*lines, "", "## For machines", "", "```json", self.json(), "```", ""])

    def json(self) -> str:
        checks = [{**asdict(check), "seconds": round(check.seconds, 1)} for check in self.checks]
        rows = ",\n  ".join(json.dumps(check) for check in checks)
        head = json.dumps({"exit_code": self.exit_code, "facts": self.facts})
        return f'{head[:-1]},\n "checks": [\n  {rows}\n ]}}'


def clean(text: str) -> str:
    """Its first line, which says nothing of this machine: addresses, host name and absolute paths are replaced. (Further lines are
    the end of some log.)"""
    line = " ".join(text.strip().partition("\n")[0].split()).rstrip(":")
    line = _PATH.sub("<path>", _ADDRESS.sub("<address>", line))
    host = socket.gethostname()
    if len(host) > 2:
        line = re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", "<host>", line)
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 1] + "…"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(status: Status) -> str:
    return "**FAILED**" if status == "failed" else status
