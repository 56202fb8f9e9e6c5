"""Every input of the two deployment guides through the code of `kvpool config check`; what is expected stands in manifest.toml.

The host is one that has what the guides need: disks, huge pages, memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pydantic_core
import pytest
from tests.unit.options.mistake_cases import on

from kvpool.options import Deployment, NotAvailableError, OptionError
from kvpool.options.check import check, the_cleaned
from kvpool.options.jsonfile import clean
from kvpool.options.transfer import read_transfer_config

HERE = Path(__file__).parent
INPUTS = tomllib.loads((HERE / "manifest.toml").read_text(encoding="utf-8"))["input"]
STUB = '#!/bin/bash\nprintf "%s\\0" "$@" > "$CAPTURE/arguments"\nenv -0 > "$CAPTURE/environment"\n'
BASE_ENV = {"MODEL_PATH": "model", "HOME": "/nonexistent"}
SSD_DIRECTORY = "/nvme/mooncake_offload"


class Launch(NamedTuple):
    """What an operator's input comes down to."""

    transfer: str | None
    files: list[str]
    additional: str | None
    env: dict[str, str]
    deployment: Deployment


def ids(kinds, key=None):
    chosen = [item for item in INPUTS if item["kind"] in kinds and (key is None or key in item)]
    return pytest.mark.parametrize("item", chosen, ids=[item["id"] for item in chosen])


@pytest.fixture
def launch(tmp_path):
    """Turns an input into a Launch; nothing but bash and stubs runs, in an empty directory."""

    def prepare(item) -> Launch:
        path = _copy(item["path"], tmp_path)
        env = {**BASE_ENV, **item.get("env", {})}
        if item["kind"] == "script":
            arguments, env = _run_script(path, env, item.get("set", {}), tmp_path)
            return Launch(
                arguments.get("--kv-transfer-config"),
                [],
                arguments.get("--additional-config"),
                _placed(env, item, tmp_path),
                _deployment(arguments),
            )
        if item["kind"] == "env":
            env = _run_bash(f"set -a; . {path}; env -0", env, tmp_path)
        transfer = _copy(item["config"], tmp_path).read_text() if "config" in item else None
        if item["kind"] == "config":
            transfer = path.read_text()
        return Launch(transfer, [str(path)] if item["kind"] == "file" else [], None, _placed(env, item, tmp_path), on())

    return prepare


def _copy(name, tmp_path):
    """A copy of an input file in which the directory of the disk tier exists."""
    (tmp_path / "nvme").mkdir(exist_ok=True)
    target = tmp_path / Path(name).name
    target.write_text((HERE / name).read_text(encoding="utf-8").replace(SSD_DIRECTORY, str(tmp_path / "nvme")), encoding="utf-8")
    return target


def _placed(env, item, tmp_path):
    """The environment with paths that lead to the input files standing in for the operator's."""
    places = {there: str(_copy(here, tmp_path)) for there, here in item.get("place", {}).items()}
    return {name: places.get(value, value) for name, value in env.items()}


def _run_bash(script, env, tmp_path):
    path = f"{tmp_path}/stubs:{os.defpath}"
    bash = [shutil.which("bash"), "-c", script]
    done = subprocess.run(bash, env={**env, "PATH": path}, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def _run_script(path, env, changes, tmp_path):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("python", "python3", "vllm"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    text = path.read_text()
    for name, value in changes.items():
        text, count = re.subn(rf'^{name}=".*"$', f'{name}="{value}"', text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)
    _run_bash(f". {path}", {**env, "CAPTURE": str(tmp_path)}, tmp_path)
    words = (tmp_path / "arguments").read_text().split("\0")
    arguments = {word: words[index + 1] for index, word in enumerate(words) if word.startswith("--")}
    pairs = (tmp_path / "environment").read_text().split("\0")
    return arguments, dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _deployment(arguments):
    sizes = {name: arguments.get(flag) for name, flag in (("tp", "--tensor-parallel-size"), ("dp", "--data-parallel-size"))}
    known = {name: int(value) for name, value in sizes.items() if value is not None}
    return on(**known, eager="--enforce-eager" in arguments)


def outcome(item, launched, *, fix=False):
    """How the check ends, and its one line."""
    transfer, files, additional, env, deployment = launched
    try:
        checked = check(transfer, files, env, additional=additional, fix=fix, deployment=deployment)
    except NotAvailableError as error:
        return "not available yet", str(error)
    except OptionError as error:
        return "refused", str(error)
    assert checked.sections
    return "accepted", ""


@ids(["script", "config", "file", "env"])
def test_inputs_end_as_the_manifest_says(item, launch):
    result, line = outcome(item, launch(item))
    assert result == item["outcome"], line
    assert item.get("message", "") in line
    assert "\n" not in line


@ids(["script", "config", "file", "env"], "fixed")
def test_slips_can_be_fixed(item, launch):
    launched = launch(item)
    assert outcome(item, launched, fix=True)[0] == item["fixed"]
    if "clean" in item:
        fixed = the_cleaned(check(launched.transfer, launched.files, launched.env, fix=True))
        assert fixed.rstrip() == _copy(item["clean"], Path(launched.files[0]).parent).read_text().rstrip()


@ids(["script", "config"], "options")
def test_values_arrive(item, launch):
    launched = launch(item)
    raw = json.loads(clean(launched.transfer, "input")[0])
    parsed = read_transfer_config(raw, env=launched.env, deployment=launched.deployment)
    pool = next(connector for connector in parsed.connectors if connector.loaded is not None)
    values = pool.options.model_dump(mode="json")
    assert {key: values[key] for key in item["options"]} == item["options"]


@ids(["command"])
def test_commands_are_what_bash_can_read(item):
    done = subprocess.run(["bash", "-n", HERE / item["path"]], capture_output=True, text=True, timeout=120, check=False)
    assert ("parsed" if done.returncode == 0 else "refused") == item["outcome"], done.stderr
    assert item.get("message", "") in done.stderr


@pytest.mark.parametrize("name", ["mooncake_master", "mooncake_master_tenants"])
def test_commands_of_the_master_are_read(name):
    text = (HERE / "commands" / f"{name}.sh").read_text(encoding="utf-8")
    (section,) = check(None, [], {}, services=[text.partition("curl")[0]]).sections
    assert {row.key: row.value for row in section.rows}["port"] == 50088


@pytest.mark.parametrize("name", ["yuanrong_workers", "yuanrong_remote_h2d"])
def test_commands_of_workers_are_read(name):
    text = (HERE / "commands" / f"{name}.sh").read_text(encoding="utf-8")
    for variable, value in (
        ("WORKER_IP", "10.0.0.1"),
        ("COORDINATOR_ADDRESS", "10.0.0.9:31511"),
        ("ETCD_ADDRESS", "10.0.0.9:2379"),
    ):
        text = text.replace(f"${{{variable}}}", value)
    commands = [command for command in re.split(r"\n\n", text) if "dscli start" in command and " -w" in command]
    assert len(commands) >= 2
    for command in commands:
        checked = check(None, [], {}, services=[command], deployment=on())
        assert checked.sections[0].title == "--service: dscli"
        assert [line for line in checked.warnings if "relative" not in line] == []


def test_every_file_is_in_the_manifest_once_or_stands_in_for_one():
    named = {item[key] for item in INPUTS for key in ("path", "config", "clean") if key in item}
    named |= {place for item in INPUTS for place in item.get("place", {}).values()}
    files = {str(path.relative_to(HERE)) for path in HERE.glob("*/*") if path.is_file() and path.parent.name != "__pycache__"}
    assert files == named
    assert len({item["id"] for item in INPUTS}) == len(INPUTS)


def test_marks_are_of_three_kinds_and_refusals_are_refused_here_too():
    for item in INPUTS:
        mark = item["mark"]
        assert mark in ("as is", "needs hardware") or mark.startswith("refused upstream: ")
        if mark.startswith("refused upstream: "):
            assert item["outcome"] == "refused", item["id"]


def test_the_printed_mooncake_file_fails_upstream_as_the_manifest_says():
    item = next(item for item in INPUTS if item["path"] == "kv_pool/mooncake.json")
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads((HERE / item["path"]).read_text(encoding="utf-8"))
    assert item["mark"] == f"refused upstream: {caught.value}"


@ids(["script"], "fixed")
def test_vllm_refuses_comments_as_the_manifest_says(item, launch):
    with pytest.raises(ValueError) as caught:
        pydantic_core.from_json(launch(item).transfer)  # what vLLM reads its JSON arguments with
    assert item["mark"] == f"refused upstream: Invalid JSON: {caught.value}"
