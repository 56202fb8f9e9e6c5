"""Size and typing limits of the house rules: files, functions, annotations. Prints the offenders and fails if there are any."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parents[1]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """Every Python file that git tracks or would track, relative to the root of the repository."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(line) for line in sorted(set(listed.splitlines())) if (ROOT / line).is_file()]


def offences(path: Path) -> Iterator[str]:
    """What is wrong with one file; functions are measured in `src/` only, files everywhere."""
    text = (ROOT / path).read_text()
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines (at most {MAX_FILE_LINES})"
    if path.parts[0] != "src":
        return
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, FunctionNode):
            yield from function_offences(path, node)


def function_offences(path: Path, node: FunctionNode) -> Iterator[str]:
    where = f"{path}:{node.lineno}: {node.name}"
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_FUNCTION_LINES:
        yield f"{where}: {length} lines (at most {MAX_FUNCTION_LINES})"
    missing = [arg.arg for arg in untyped(node)]
    if missing:
        yield f"{where}: no type for {', '.join(missing)}"
    if node.returns is None and node.name != "__init__":
        yield f"{where}: no return type"


def untyped(node: FunctionNode) -> list[ast.arg]:
    """Arguments without annotation, except the `self` or `cls` of a method."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    rest = [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [arg for arg in [*positional, *given.kwonlyargs, *rest] if arg.annotation is None]


def main() -> int:
    files = python_files()
    found = [offence for path in files for offence in offences(path)]
    print("\n".join(found) if found else f"sizes: {len(files)} files within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
