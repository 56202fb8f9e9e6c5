"""`kvpool acceptance` with real engines and a tiny model: what it says of a good pool, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.ops.acceptance import AcceptanceOptions, run
from kvpool.ops.launch.descendants import descendants
from tests.engine.models import model_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_acceptance_of_the_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six starts of engines: some four minutes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before, shared = descendants(), set(os.listdir("/dev/shm"))
    said: list[str] = []
    arguments = ("--skip-tokenizer-init",)
    options = AcceptanceOptions(
        "cpu", "local", str(model_path("qwen3")), kv_cache=128 << 20, dram=256 << 20, engine_args=arguments, logs=tmp_path
    )
    report = run(options, said.append)
    assert [check for check in report.checks if check.status != "passed"] == []
    assert report.exit_code == 0
    text = report.markdown()
    assert str(tmp_path) not in text
    assert "127.0.0.1" not in text
    assert not descendants() - before
    left = set(os.listdir("/dev/shm")) - shared
    assert not [name for name in left if not name.startswith("sem.mp-")]  # of the engine that was killed with its resource tracker


def test_a_model_that_vllm_cannot_start_is_status_2(tmp_path: Path) -> None:
    """One real start that fails at once; the report says why, without saying where."""
    folder = tmp_path / "no-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "no-such-type", "architectures": ["NoSuchModel"]}')
    report = tmp_path / "report.md"
    command = [sys.executable, "-c", "import sys; from kvpool.cli import app; sys.argv[:1] = ['kvpool']; app()", "acceptance"]
    words = ["--device", "cpu", "--model", str(folder), "--only", "exactness", "--report", str(report)]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    text = report.read_text()
    assert "| all checks | not run | 0.0 | reference ended before it was ready" in text
    assert str(tmp_path) not in text
