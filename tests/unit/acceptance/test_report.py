"""The report: its exit code, and that it tells nothing of the machine."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from kvpool.ops.acceptance.facts import gather, model_name
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.acceptance.report import Check, Report, clean

PASSED = Check("exactness", "cold", "passed", 1.25, "same | tokens")
FAILED = Check("kill list", "killed", "failed", 2.0, "wrong answer")
OPEN = Check("faults", "a get hangs", "not run", 0.0, "the time was over")
NOT_ASKED = Check("faults", "a put hangs", "not run", 0.0, "not asked for (--only)", needed=False)


def test_the_facts_are_told_where_the_system_does_not_tell_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert gather(AcceptanceOptions("cpu", "local"), "m")["CPUs"].startswith("3 (")


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([PASSED], 0),
        ([PASSED, NOT_ASKED], 0),
        ([PASSED, FAILED, OPEN], 1),
        ([PASSED, OPEN], 2),
        ([NOT_ASKED], 2),
        ([], 2),
    ],
)
def test_exit_code(checks: list[Check], code: int) -> None:
    assert Report({}, checks).exit_code == code


def test_markdown_has_every_check_and_the_same_as_json() -> None:
    report = Report({"device": "cpu", "store": "local"}, [PASSED, FAILED, OPEN, NOT_ASKED])
    text = report.markdown()
    assert "# Acceptance: failed" in text
    assert "1 passed, 1 failed, 2 not run" in text
    assert r"| cold | passed | 1.2 | same \| tokens |" in text
    assert "| killed | **FAILED** | 2.0 | wrong answer |" in text
    assert "| a get hangs | not run | 0.0 | the time was over |" in text
    block = re.search(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    found = json.loads(block[1])
    assert found["exit_code"] == 1
    assert found["facts"] == {"device": "cpu", "store": "local"}
    assert [check["status"] for check in found["checks"]] == ["passed", "failed", "not run", "not run"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("cannot open /srv/models/secret-model/config.json now", "cannot open <path> now"),
        ("see '/var/x y' and ~/models/a.bin, /e", "see '<path> y' and <path>, <path>"),
        ("http://10.0.0.7:8000/v1 said no", "<address> said no"),
        ("connect to 10.1.2.3:50051 refused", "connect to <address> refused"),
        ("connect to [fe80::1]:50051 or [::1] refused", "connect to <address> or <address> refused"),
        ("localhost:80 is taken", "<address> is taken"),
        ("it ended:\n  the end of its log", "it ended"),
        ("3/4 of the tokens, 0.4 GB/s, vLLM 0.32.0", "3/4 of the tokens, 0.4 GB/s, vLLM 0.32.0"),
    ],
)
def test_reasons_are_cleaned(said: str, kept: str) -> None:
    assert clean(said) == kept


def test_reasons_lack_the_host_name_and_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    assert clean("node-17 does not answer (node-171 does)") == "<host> does not answer (node-171 does)"
    assert len(clean("word " * 1000)) == 300


def test_facts_name_versions_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "secret-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30}')
    facts = gather(AcceptanceOptions("cpu", "local", str(folder)), model_name(folder))
    assert facts["model"] == "LlamaForCausalLM, 30 layers"
    assert facts["store"] == "local"
    assert re.fullmatch(r"\d+ \(\w+\)", facts["CPUs"])
    assert re.fullmatch(r"\d+ GiB", facts["memory"])
    assert "secret" not in str(facts)
    assert "/" not in str(facts).replace("/x86", "")


def test_a_model_without_a_readable_configuration(tmp_path: Path) -> None:
    assert model_name(tmp_path) == "config.json does not say"
