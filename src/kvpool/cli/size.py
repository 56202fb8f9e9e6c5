"""`kvpool size MODEL`"""

from __future__ import annotations

import enum
import json
from dataclasses import fields
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.ops.sizing import size as size_of
from kvpool.ops.sizing.figures import Figure, Report
from kvpool.ops.sizing.kv_cache import INDEXER_DTYPES, KV_DTYPES
from kvpool.ops.sizing.model_file import read_model
from kvpool.ops.sizing.plan import Plan
from kvpool.options import OptionError
from kvpool.options.amounts import GIB
from kvpool.options.ascend_store import BACKENDS, AscendStoreOptions
from kvpool.options.fields import read_fields
from kvpool.options.jsonfile import read_json
from kvpool.options.scalars import SIZE_FORM, read_size

POOL, DISK, OFFLOAD = "Pool", "Disk tiers and huge pages", "Offloading"
KvDtype = enum.Enum("KvDtype", {name: name for name in KV_DTYPES})  # type: ignore[misc]
IndexerDtype = enum.Enum("IndexerDtype", {name: name for name in INDEXER_DTYPES})  # type: ignore[misc]

Backend = enum.Enum("Backend", {name: name for name in BACKENDS})  # type: ignore[misc]
AUTO, FP8 = KvDtype("auto"), IndexerDtype("fp8")


def _size(text: str | int) -> int:
    try:
        return read_size(text)
    except ValueError:
        raise typer.BadParameter(f"{text}: expected {SIZE_FORM}") from None


def _number(help: str, panel: str | None = None, low: int = 1) -> Any:  # noqa: ANN401 - as typer's own
    return typer.Option(min=low, help=help, rich_help_panel=panel, show_default=True)


def _bytes(help: str, panel: str) -> Any:  # noqa: ANN401
    return typer.Option(parser=_size, metavar="SIZE", help=help, rich_help_panel=panel)


def _share(help: str) -> Any:  # noqa: ANN401
    return typer.Option(min=0.0, max=1.0, help=help, rich_help_panel=POOL)


Count = int | None
Size = int | None
DEFAULT = Plan(tokens=1, concurrency=1)


def size(
    model: Annotated[str, typer.Argument(help="A folder with config.json, a config.json, or owner/name on the hub.")],
    tokens: Annotated[int, _number("Tokens of a sequence.")],
    concurrency: Annotated[int, _number("Sequences at once, of all engines together.")],
    tp: Annotated[int, _number("Tensor-parallel size.")] = 1,
    pp: Annotated[int, _number("Pipeline-parallel size.")] = 1,
    dp: Annotated[int, _number("Data-parallel size.")] = 1,
    block_size: Annotated[int, _number("The engine's --block-size.")] = DEFAULT.block_size,
    kv_dtype: Annotated[KvDtype, typer.Option(help="auto: two bytes, as the weights.")] = AUTO,
    indexer_dtype: Annotated[IndexerDtype, typer.Option(help="Keys of a DSA indexer; fp8 with scales is vLLM's.")] = FP8,
    hf_overrides: Annotated[str, typer.Option(metavar="JSON", help="Settings over those of config.json.")] = "{}",
    backend: Annotated[Backend | None, typer.Option(help="Figures of this store alone.", rich_help_panel=POOL)] = None,
    ranks: Annotated[Count, _number("Processes that give memory, on all nodes. Unset: TP x PP x DP.", POOL)] = None,
    nodes: Annotated[int, _number("Nodes.", POOL)] = 1,
    dies: Annotated[Count, _number("Dies of a node.", POOL)] = None,
    separated: Annotated[bool, typer.Option(help="One standalone process a node gives the memory.", rich_help_panel=POOL)] = False,
    spare: Annotated[int, _number("Local services to be added later.", POOL, 0)] = 0,
    pool_size: Annotated[Size, _bytes("The whole pool. Unset: what the sequences need.", POOL)] = None,
    dram_size: Annotated[Size, _bytes("Planned dram.size or global_segment_size, of each process.", POOL)] = None,
    world_size: Annotated[Count, _number("Planned world_size.", POOL)] = None,
    host_memory: Annotated[Size, _bytes("Memory that is free on a node.", POOL)] = None,
    max_batched_tokens: Annotated[int, _number("The engine's --max-num-batched-tokens.", POOL)] = DEFAULT.max_batched_tokens,
    eviction_high_watermark: Annotated[float, _share("Of mooncake_master.")] = DEFAULT.eviction_high_watermark,
    eviction_ratio: Annotated[float, _share("Of mooncake_master.")] = DEFAULT.eviction_ratio,
    disk_size: Annotated[Size, _bytes("Mooncake: the disk that the ranks of a node share.", DISK)] = None,
    offload_buffer: Annotated[Size, _bytes("Mooncake: planned MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES.", DISK)] = None,
    local_buffer: Annotated[int, _bytes("Mooncake: local_buffer_size.", DISK)] = DEFAULT.local_buffer,
    kv_memory: Annotated[Size, _bytes('"Available KV cache memory" of a worker.', DISK)] = None,
    fabric: Annotated[bool, typer.Option(help="Fabric memory is on (A3).", rich_help_panel=DISK)] = False,
    fabric_capacity: Annotated[Count, _number("Planned fabric_memory.max_capacity in GB.", DISK)] = None,
    ubsio_memory: Annotated[Size, _bytes("MemCache: memory of a node for UBS IO.", DISK)] = None,
    ubsio_size: Annotated[Count, _number("MemCache: planned ubsio.mem.size_in_gb.", DISK, 0)] = None,
    shared_memory_mb: Annotated[Count, _number("openYuanrong: planned shared_memory_size_mb.", DISK)] = None,
    huge_pages: Annotated[Count, _number("Reserved huge pages of 2 MiB of a node.", DISK, 0)] = None,
    layerwise_buffers: Annotated[Count, _number("layerwise_num_shared_buffers.", OFFLOAD)] = None,
    layerwise_independent: Annotated[str, typer.Option(help='"all" or a list.', rich_help_panel=OFFLOAD)] = "[0]",
    topk_buffer: Annotated[Count, _number("topk_buffer_size.", OFFLOAD)] = None,
    max_num_seqs: Annotated[Count, _number("Rows of the hot buffer. Unset: sequences of an engine.", OFFLOAD)] = None,
    dram_per_dp: Annotated[Count, _number("Planned dram_size_per_dp_GB.", OFFLOAD)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How much memory, disk and world size a deployment needs, each figure with its formula.

    Exit status 1 where something would not work, 2 where the question itself is wrong."""
    _answer(model, hf_overrides, as_json, locals())


def _answer(model: str, hf_overrides: str, as_json: bool, given: dict[str, Any]) -> None:
    """Print the report and exit by what it found. ``given``: options by name, as the fields of Plan, and others."""
    try:
        values = {field.name: given[field.name] for field in fields(Plan)}
        values |= {name: value.value for name, value in values.items() if isinstance(value, enum.Enum)}
        values["layerwise_independent"] = _layers(given["layerwise_independent"])
        report = size_of(read_model(model, read_json(hf_overrides, "--hf-overrides")), Plan(**values))
    except OptionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _layers(text: str) -> tuple[int, ...] | Literal["all"]:
    """As layerwise_independent_layers of the connector: "all" or a JSON list."""
    try:
        value = text if text == "all" else json.loads(text)
    except json.JSONDecodeError:
        value = text
    reading = read_fields(AscendStoreOptions, {"layerwise_independent_layers": value})
    return reading.options.layerwise_independent_layers


def _print(report: Report) -> None:
    console = Console()
    for section in report.sections:
        table = Table(title=escape(section.title), title_justify="left")
        for column in ("figure", "value", "formula", "rule of"):  # nothing is cut off, however narrow the terminal is
            table.add_column(column, overflow="fold", no_wrap=column == "figure")
        table.columns[1].min_width = max(len(f"{figure.value:,}") for figure in section.figures)  # numbers stay whole
        for figure in section.figures:
            table.add_row(figure.name, _shown(figure), escape(figure.formula), escape(figure.source))
        console.print(table)
    for finding in report.findings:
        kind, style = ("would not work", "bold red") if finding.problem else ("warning", "yellow")
        console.print(f"{kind}: {finding.key}: {escape(finding.text)}; {escape(finding.fix)}", style=style, soft_wrap=True)


def _shown(figure: Figure) -> str:
    if figure.unit == "bytes":
        gib = f" ({figure.value / GIB:.2f} GiB)" if figure.value >= GIB // 100 else ""
        return f"{figure.value:,}{gib}"
    if figure.unit == "share":
        return f"{figure.value:.4f}"
    return f"{figure.value:,}" + (f" {figure.unit}" if figure.unit in ("GB", "MB") else "")
