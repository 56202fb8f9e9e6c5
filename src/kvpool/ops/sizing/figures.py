"""What a sizing says: figures with their formulas, and findings with their fixes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Unit = Literal["bytes", "GB", "MB", "count", "share"]
GUIDE, OFFLOAD, VLLM, OWN = "KV pool guide", "layerwise and sparse guide", "vLLM 0.32", "kvpool"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. ``formula``: in words and with the numbers that went in. ``source``: who states the rule, with the section."""

    name: str
    value: int | float
    unit: Unit
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What would not work (``problem``) or is risky, and what to do about it. ``key``: the option it is about."""

    problem: bool
    key: str
    text: str
    fix: str


@dataclass(slots=True)
class Section:
    """Figures that belong together. Findings are added while they are computed."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, name: str, value: int | float, unit: Unit, formula: str, source: str) -> None:
        self.figures.append(Figure(name, value, unit, formula, source))

    def found(self, problem: bool, key: str, text: str, fix: str) -> None:
        self.findings.append(Finding(problem, key, text, fix))

    def problem(self, key: str, text: str, fix: str) -> None:
        self.found(True, key, text, fix)

    def warning(self, key: str, text: str, fix: str) -> None:
        self.found(False, key, text, fix)


@dataclass(frozen=True, slots=True)
class Report:
    """All sections; ``ok`` is False where something would not work."""

    sections: list[Section]

    @property
    def findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]

    @property
    def ok(self) -> bool:
        return not any(finding.problem for finding in self.findings)

    def value(self, name: str) -> int | float:
        """The figure of that name; KeyError where it was not computed."""
        for section in self.sections:
            for figure in section.figures:
                if figure.name == name:
                    return figure.value
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "sections": [asdict(section) for section in self.sections]}
