"""The figures of a run: one flat object, written as JSON, as a table and as a plot.

A figure that could not be measured is null, and `note_<figure>` says why.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Value = float | int | str | bool | None
FACTS = re.compile(r"(machine|version)_\w+|\w+_(seconds|date|commit)|date|commit|quick")


@dataclass(frozen=True)
class Aim:
    """What a figure should reach: a constant, or the figure with that name; ``at_least`` or at most."""

    pattern: str
    bound: float | str
    at_least: bool

    def text(self, match: re.Match[str], figures: dict[str, Value]) -> tuple[str, bool]:
        """The aim in words, and whether it is met."""
        limit = figures.get(match.expand(self.bound)) if isinstance(self.bound, str) else self.bound
        value = figures[match.string]
        if not isinstance(value, int | float) or not isinstance(limit, int | float):
            return "", False
        met = value >= limit if self.at_least else value <= limit
        return f"{'>=' if self.at_least else '<='} {limit:.4g}", met


AIMS = (
    Aim(r"local_(put|get)_vs_memcpy", 0.8, True),
    Aim(r"exists_1000_ms", 1.0, False),
    Aim(r"(mooncake|memcache|yuanrong)_(put|get)_overhead", 1.1, False),
    Aim(r"ttft_pool_extra_ms_(\w+)", r"ttft_pool_extra_bound_ms_\1", False),
    Aim(r"zero_hit_ratio_low", 0.97, True),
    Aim(r"ttft_\w+_over_kvpool_\d+", 1.0, True),
    Aim(r"hit_rate_off_\w+", 1.0, False),
    Aim(r"proxy_added_token_ms", 2.0, False),
    Aim(r"proxy_added_first_byte_ms", 5.0, False),
)


@dataclass
class Report:
    """Collects figures; `folder` gets latest.json, table.md and figures.png. Figures of an earlier run stay until they are
    measured again: `<part>_date` and `<part>_commit` say when and on what each part was."""

    folder: Path
    figures: dict[str, Value] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def load(self) -> None:
        path = self.folder / "latest.json"
        if path.exists():
            self.figures = json.loads(path.read_text())

    def forget(self, pattern: str) -> None:
        """Drop the figures of a part, and their notes, before it runs again."""
        own = re.compile(rf"(note_)?({pattern})")
        self.figures = {name: value for name, value in self.figures.items() if not own.fullmatch(name)}

    def add(self, name: str, value: Value) -> None:
        rounded = float(f"{value:.4g}") if isinstance(value, float) else value
        self.figures[name] = rounded
        print(f"bench: {name} = {rounded}", flush=True)

    def missing(self, name: str, reason: str) -> None:
        """A figure that could not be measured."""
        self.add(name, None)
        self.add(f"note_{name}", " ".join(reason.split())[:300])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A failing part is named at the end of the run; the other parts go on."""
        print(f"bench: part {name}", flush=True)
        error_name = f"{name.replace('-', '_')}_error"
        self.figures.pop(error_name, None)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it was, the other parts can run
            self.failed.append(name)
            self.add(error_name, f"{type(error).__name__}: {error}"[:300])
            print(error, flush=True)

    def write(self, plot: Callable[[dict[str, Value], Path], None] | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "latest.json").write_text(json.dumps(dict(sorted(self.figures.items())), indent=1) + "\n")
        (self.folder / "table.md").write_text(table(self.figures))
        if plot is not None:
            plot(self.figures, self.folder / "figures.png")


def table(figures: dict[str, Value]) -> str:
    """All figures as Markdown, with what they were to reach."""
    rows, facts = [], []
    for name, value in sorted(figures.items()):
        if FACTS.fullmatch(name):
            facts.append(f"| {name} | {value} |")
        elif not name.startswith("note_"):
            aim, met = aim_of(name, figures)
            shown = f"not measured: {figures.get(f'note_{name}', '')}" if value is None else plain(value)
            rows.append(f"| `{name}` | {shown} | {aim} | {('yes' if met else '**no**') if aim else ''} |")
    head = ["# Measured", "", "| figure | value | aim | met |", "|---|---:|---:|---|"]
    return "\n".join([*head, *rows, "", "| run | |", "|---|---|", *facts, ""])


def plain(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def aim_of(name: str, figures: dict[str, Value]) -> tuple[str, bool]:
    for aim in AIMS:
        if match := re.fullmatch(aim.pattern, name):
            return aim.text(match, figures)
    return "", False


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
