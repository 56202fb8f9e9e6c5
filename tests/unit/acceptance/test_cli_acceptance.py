"""The command: what it refuses, what it writes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli import app
from kvpool.ops import acceptance
from kvpool.ops.acceptance import sequence
from kvpool.ops.acceptance.options import AcceptanceOptions
from kvpool.ops.acceptance.report import PARTS, Check, Report
from kvpool.ops.launch import guard


def _invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["acceptance", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], 'error: --device="tpu": accepted: cpu, cuda, npu'),
        (["--device", "cpu", "--backend", "redis"], 'error: --backend="redis": accepted: local, mooncake, memcache, yuanrong'),
        (["--device", "npu", "--backend", "local"], "does not reach the memory of npu"),
        (["--device", "cpu", "--only", "speed"], 'error: --only="speed": accepted: conformance, exactness, faults, kill list'),
        (["--device", "cpu", "--model", "no/such/folder"], "expected a folder with config.json"),
        (["--device", "cpu", "--dram", "much"], "error: --dram 'much': expected a size such as 1GB"),
        (["--device", "cpu", "--", "--port", "80"], "is set by the launch"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(words: list[str], message: str) -> None:
    result = _invoke(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("failed", 1), ("not run", 2)])
def test_the_report_is_written_and_says_how_it_ended(
    status: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[AcceptanceOptions] = []

    def run(options: AcceptanceOptions, say: Any) -> Report:
        seen.append(options)
        return Report({"device": options.device}, [Check("faults", "a get hangs", status, 1.0)])

    monkeypatch.setattr(acceptance, "run", run)
    monkeypatch.setattr(guard, "guarded", lambda run, say: run())  # in this process, where it is seen
    report, as_json = tmp_path / "report.md", tmp_path / "report.json"
    words = ["--device", "npu", "--only", "faults", "--minutes", "2", "--report", str(report), "--json", str(as_json)]
    result = _invoke(*words, "--", "--quantization", "ascend")
    assert result.exit_code == code
    assert "a get hangs" in report.read_text()
    assert json.loads(as_json.read_text())["exit_code"] == code
    (options,) = seen
    assert (options.backend, options.parts, options.budget_s, options.kv_cache) == ("mooncake", ("faults",), 120, None)
    assert options.engine_args == ("--quantization", "ascend")


def test_a_run_in_which_no_engine_starts_says_so_and_is_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is told to read a model that is none."""
    (tmp_path / "config.json").write_text("{}")
    said: list[str] = []

    def no_engine(*_: Any) -> Any:
        raise OSError(f"reference ended before it was ready; the end of its log ({tmp_path}/reference.log):\nno such model")

    monkeypatch.setattr(sequence, "_reference", no_engine)
    options = AcceptanceOptions("cpu", "local", str(tmp_path), parts=("exactness", "kill list"), budget_s=60)
    report = acceptance.run(options, said.append)
    assert report.exit_code == 2
    by_part = {check.part: check for check in report.checks}
    assert set(by_part) == set(PARTS)
    assert by_part["exactness"].needed
    assert not by_part["faults"].needed
    assert by_part["exactness"].reason == "reference ended before it was ready; the end of its log (<path>)"
    assert any("no such model" in line for line in said)
    assert str(tmp_path) not in report.markdown()
