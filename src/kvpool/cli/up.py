"""`kvpool up mixed|pd|separated`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from kvpool.ops.launch import LaunchOptions
    from kvpool.ops.launch.options import LaunchDevice
    from kvpool.ops.launch.production import Production

READY_S = 600.0
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
HERE, THERE = "On this host", "Files for production hosts"
ONLY_HERE = (
    "device", "host", "port", "prefill_port", "decode_port", "kv_port", "kv_cache", "pool", "logs", "timeout", "dry_run"
)  # fmt: skip
ONLY_THERE = ("link", "service_host", "prefill_host", "decode_host", "nic", "write")

Mode = Annotated[str, typer.Argument(metavar="mixed|pd|separated", help="Which deployment of the guides.")]
Model = Annotated[str, typer.Option(help="A folder, or a name that vLLM finds.")]
Backend = Annotated[str | None, typer.Option(help="local, mooncake, memcache or yuanrong. Default: what fits.")]
Size = Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="Of every engine.")]
Dram = Annotated[str, typer.Option(help="Memory of the pool; with --series of each host's.")]
Served = Annotated[str | None, typer.Option("--served-model-name", help="The model's name in requests.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: what this host shows.", rich_help_panel=HERE)]
Host = Annotated[str, typer.Option(help="Where requests are taken; all else is on loopback.", rich_help_panel=HERE)]
Port = Annotated[int | None, typer.Option(min=1, max=65535, show_default="a free one", rich_help_panel=HERE)]
KvCache = Annotated[str | None, typer.Option(help="Each rank's own cache. CPUs: 1GB, else vLLM decides.", rich_help_panel=HERE)]
Pool = Annotated[str | None, typer.Option(help="local: a pool of this name, which stays.", rich_help_panel=HERE)]
Logs = Annotated[Path | None, typer.Option(help="Keep the logs in this folder.", rich_help_panel=HERE)]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds until everything must answer.", rich_help_panel=HERE)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started.", rich_help_panel=HERE)]
Series = Annotated[str | None, typer.Option(help="a2, a3, a5, cuda or cpu: start nothing, print files.", rich_help_panel=THERE)]
Link = Annotated[str | None, typer.Option(help="Between devices: a3 hccs or roce, a5 ub or uboe.", rich_help_panel=THERE)]
Address = Annotated[str | None, typer.Option(help="Its address, as other hosts reach it.", rich_help_panel=THERE)]
Nic = Annotated[str | None, typer.Option(help="The interface of these addresses.", rich_help_panel=THERE)]
Write = Annotated[Path | None, typer.Option(help="Write the files to this folder.", rich_help_panel=THERE)]


def up(
    context: typer.Context,
    mode: Mode,
    model: Model,
    backend: Backend = None,
    tensor_parallel_size: Size = 1,
    dram: Dram = "4GB",
    served_model_name: Served = None,
    device: Device = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    prefill_port: Port = None,
    decode_port: Port = None,
    kv_port: Port = None,
    kv_cache: KvCache = None,
    pool: Pool = None,
    logs: Logs = None,
    timeout: Timeout = READY_S,
    dry_run: DryRun = False,
    series: Series = None,
    link: Link = None,
    service_host: Address = None,
    prefill_host: Address = None,
    decode_host: Address = None,
    nic: Nic = None,
    write: Write = None,
) -> None:
    """Start engines, pool and proxy on this host, until Ctrl-C. Arguments after -- go to every engine.

    Nothing is left behind, except for a pool that --pool names and logs in the folder of --logs."""
    try:
        _refuse_unused(context)
        if series is not None:
            _files(_production(context), write)
            return
        options = _launch(context)
        if dry_run:
            _show(options)
        else:
            raise typer.Exit(_guarded(options, logs, timeout))
    except (ValueError, OSError, ImportError) as error:
        raise typer.Exit(_refused(error)) from None


def _refused(error: Exception) -> int:
    """Say it; the exit status."""
    typer.echo(f"error: {error}", err=True)
    return 2 if isinstance(error, ValueError) else 1


def _refuse_unused(context: typer.Context) -> None:
    """ValueError for an option that would be ignored: of the other half, of another mode or store."""
    given = {name for name in context.params if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"}
    here = context.params["series"] is None
    words = "only with --series" if here else "not with --series"
    for name in ONLY_THERE if here else ONLY_HERE:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is of use {words}")
    if "decode_host" in given and context.params["mode"] != "pd":
        raise ValueError("--decode-host is of use only in mode pd")


def _size(flag: str, text: str) -> int:
    from kvpool.options.scalars import read_size

    try:
        return read_size(text)
    except ValueError:
        raise ValueError(f"{flag} {text!r}: expected a size such as 1GB") from None


def _launch(context: typer.Context) -> LaunchOptions:
    from kvpool.ops.launch.options import LaunchOptions, check, default_backend
    from kvpool.options.probe import HOST

    given = context.params
    device = cast("LaunchDevice", given["device"] or HOST.accelerator() or "cpu")  # for check to judge
    kv_cache = given["kv_cache"] or ("1GB" if device == "cpu" else None)
    options = LaunchOptions(
        mode=given["mode"],
        model=os.path.abspath(given["model"]) if os.path.isdir(given["model"]) else given["model"],
        backend=given["backend"] or default_backend(given["mode"], device),
        device=device,
        host=given["host"],
        port=given["port"],
        prefill_port=given["prefill_port"],
        decode_port=given["decode_port"],
        kv_port=given["kv_port"],
        tp=given["tensor_parallel_size"],
        dram=_size("--dram", given["dram"]),
        kv_cache=None if kv_cache is None else _size("--kv-cache", kv_cache),
        pool=given["pool"],
        served_name=given["served_model_name"],
        engine_args=tuple(context.args),
    )
    check(options)
    return options


def _show(options: LaunchOptions) -> None:
    from kvpool.ops.launch import make_plan
    from kvpool.ops.launch.place import shown_place
    from kvpool.ops.launch.shell import shown_plan

    typer.echo(shown_plan(make_plan(options, shown_place(options))), nl=False)


def _guarded(options: LaunchOptions, logs: Path | None, timeout: float) -> int:
    from kvpool.ops.launch.guard import guarded

    if logs is not None:
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
    return guarded(lambda: _run(options, logs, timeout), _say)


def _run(options: LaunchOptions, logs: Path | None, timeout: float) -> int:
    """Until a signal, or the end of a process; the exit status."""
    from kvpool.ops.launch import Told, launched

    ready = False
    try:
        with launched(options, _say, timeout, logs) as (plan, launch):
            ready = True
            _say(f"ready: send requests to {plan.url}/v1 (model {plan.model}); Ctrl-C stops everything")
            launch.watch()
    except Told as told:
        return 0 if ready else told.exit_code
    except (ValueError, OSError, ImportError) as error:
        return _refused(error)
    return 0


def _say(line: str) -> None:
    typer.echo(f"up: {line}")


def _production(context: typer.Context) -> Production:
    from kvpool.ops.launch.options import Mode as ModeName
    from kvpool.ops.launch.options import check_common
    from kvpool.ops.launch.production import Production
    from kvpool.ops.launch.series import series_backend, series_of

    given = context.params
    series = series_of(given["series"], given["link"])
    check_common(given["mode"], tuple(context.args))
    backend = series_backend(given["backend"], series, given["mode"] == "separated")
    hosts = ("127.0.0.1",) * 3 if backend == "local" else ("192.0.2.1", "192.0.2.2", "192.0.2.3")
    if backend == "local" and given["service_host"] is not None:
        raise ValueError("--service-host is of no use with the local store, which has no service")
    names = ("service_host", "prefill_host", "decode_host")
    places = {name: given[name] or usual for name, usual in zip(names, hosts, strict=True)}
    if backend == "local" and given["decode_host"] is None:
        places["decode_host"] = places["prefill_host"]
    nic = given["nic"] or ("lo" if backend == "local" else "eth0")
    name = given["served_model_name"] or os.path.basename(given["model"].rstrip("/"))
    dram, tp = _size("--dram", given["dram"]), given["tensor_parallel_size"]
    mode = cast(ModeName, given["mode"])
    return Production(mode, series, backend, given["model"], name, tp, dram, nic=nic, engine_args=tuple(context.args), **places)


def _files(chosen: Production, folder: Path | None) -> None:
    """Printed, each below its name, or written."""
    from kvpool.ops.launch.production import production_files

    for file in production_files(chosen):
        if folder is None:
            typer.echo(f"# ==== {file.name}\n{file.text}")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file.name
        path.write_text(file.text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
        typer.echo(str(path))
