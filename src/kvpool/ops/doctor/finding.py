"""What doctor says: a Check is a question it can ask, a Finding is an answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """``UNKNOWN``: this host does not show it, so nobody looked."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNKNOWN = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. ``fix`` is what the operator can do; empty only where nothing is wrong. Nothing in it was run."""

    area: str
    check: str
    level: Level
    found: str
    needed: str
    fix: str

    def as_json(self) -> dict[str, str]:
        return {
            "area": self.area,
            "check": self.check,
            "level": self.level.value,
            "found": self.found,
            "needed": self.needed,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """A question: ``asks`` is what it looks at, ``when`` for which deployments; both are printed in docs/doctor.md."""

    area: str
    name: str
    asks: str
    when: str = "always"

    def ok(self, found: str, needed: str = "") -> Finding:
        return Finding(self.area, self.name, Level.OK, found, needed, "")

    def warning(self, found: str, needed: str, fix: str) -> Finding:
        """It starts, but slower, smaller or less safe than meant."""
        return Finding(self.area, self.name, Level.WARNING, found, needed, fix)

    def failure(self, found: str, needed: str, fix: str) -> Finding:
        """It would not start, or not work."""
        return Finding(self.area, self.name, Level.FAILURE, found, needed, fix)

    def unknown(self, found: str, needed: str, fix: str) -> Finding:
        """It could not be looked at; ``fix`` says how to look."""
        return Finding(self.area, self.name, Level.UNKNOWN, found, needed, fix)
