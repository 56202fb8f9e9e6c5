"""docs/guide_coverage.md has a row for every section of the guides that an input of this folder comes from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "guide_coverage.md"
GUIDES = {"kv_pool": "## KV Cache Pool (Ascend Store) Deployment Guide", "layerwise": "## Layerwise and Sparse KV"}


def rows_of(guide: str) -> set[str]:
    """First words of the rows below the guide's title: "2.2.1", "4.2"."""
    _, title, rest = PAGE.read_text(encoding="utf-8").partition(GUIDES[guide])
    assert title
    return set(re.findall(r"^\| (\d(?:\.\d)*)\b", rest.partition("\n## ")[0], re.MULTILINE))


def test_every_section_with_an_input_has_a_row() -> None:
    inputs = tomllib.loads((HERE / "manifest.toml").read_text(encoding="utf-8"))["input"]
    sections = {(item["id"].split()[0], number) for item in inputs for number in re.findall(r"\b\d(?:\.\d)*\b", item["id"])}
    assert len(sections) > 30
    assert {guide for guide, _ in sections} == set(GUIDES)
    assert sorted(pair for pair in sections if pair[1] not in rows_of(pair[0])) == []
