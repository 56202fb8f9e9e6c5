"""The repository itself: what the documents promise exists, and nothing of the machine it was made on has leaked into it."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARY = {".gguf", ".png", ".safetensors"}

QUOTED = ROOT / "tests" / "guides"  # commands of published guides, quoted with the paths that they use

# Spelled in pieces: this file is searched too.
MACHINE_PATHS = ["/" + name + "/" for name in ("work", "root", "tmp", "home", "opt/" + "pypi", "opt/" + "wheels")]
LIBRARYS_OWN = "/" + "tmp/mmc_meta_service.lock"  # MemCache's, on every machine
REGISTRY_HOSTS = ["pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org", "hugging" + "face.co", "hf-" + "mirror"]


@cache
def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 20
    return [path for path in files if path.is_file() and path.suffix not in BINARY]


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("needle", MACHINE_PATHS + REGISTRY_HOSTS)
def test_no_trace_of_a_machine(needle: str) -> None:
    pattern = re.compile(r"(?<![\w./-])" + re.escape(needle) if needle.startswith("/") else re.escape(needle))
    found = []
    for path in tracked():
        if path.is_relative_to(QUOTED):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line.replace(LIBRARYS_OWN, "")):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_documented_make_targets_exist() -> None:
    used = {
        (path.name, name)
        for path in documents()
        for name in re.findall(r"(?:`|^\s*)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE)
    }
    assert {"setup", "demo", "check", "test"} <= {name for _, name in used}
    assert not sorted((file, name) for file, name in used if name not in targets())


def test_readme_names_the_two_commands() -> None:
    assert re.search(r"^make demo\b.*\nmake test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Heading anchors the way GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_in_documents_resolve() -> None:
    broken = []
    for path in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            linked = path.parent / name if name else path
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken


def test_documents_are_reachable_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w./-]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {str(path.relative_to(ROOT)) for path in documents() if path.is_relative_to(ROOT / "docs")}


@pytest.mark.parametrize("name", [".ci/run", "scripts/setup.sh"])
def test_scripts_are_executable_and_strict(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_continuous_integration_runs_check_and_test() -> None:
    assert re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE) == ["deps", "check", "test"]
