"""Every line of docs/stores/mistakes.md happens, and the right form passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.options import (
    mistake_cases_memcache,
    mistake_cases_mooncake,
    mistake_cases_pull,
    mistake_cases_stores,
    mistake_cases_yuanrong,
)

from kvpool.options import OptionError

DOCUMENT = Path(__file__).parents[3] / "docs" / "stores" / "mistakes.md"
MODULES = (mistake_cases_stores, mistake_cases_mooncake, mistake_cases_memcache, mistake_cases_yuanrong, mistake_cases_pull)
AREAS = {area: cases for module in MODULES for area, cases in module.AREAS.items()}
CASES = [(area, case) for area, cases in AREAS.items() for case in cases]
each_case = pytest.mark.parametrize(("area", "case"), CASES, ids=[f"{area}: {case.seen}" for area, case in CASES])


def documented():
    """(area, what is seen) -> error or warning."""
    rows, area = {}, ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            area = line[3:]
        elif match := re.fullmatch(r"\| `([^`]+)` \| (error|warning) \| (.+) \| (.+) \|", line):
            assert (area, match[1]) not in rows
            rows[area, match[1]] = match[2]
        else:
            assert not line.startswith("| `"), line
    return rows


def outcome(call, folder):
    try:
        return "warning", call(folder)
    except OptionError as error:
        return "error", [str(error)]


def test_the_document_lists_what_the_cases_show():
    assert set(documented()) == {(area, case.seen) for area, case in CASES}
    assert len(CASES) == len(set(documented()))


@each_case
def test_a_mistake_is_one_line_of_its_own(area, case, tmp_path):
    level, lines = outcome(case.wrong, tmp_path)
    assert level == documented()[area, case.seen], lines
    (line,) = [line for line in lines if case.seen in line]
    assert "\n" not in line


@each_case
def test_the_right_form_passes(area, case, tmp_path):
    level, lines = outcome(case.right, tmp_path)
    assert level == "warning", lines
    assert not [line for line in lines if case.seen in line]
