"""python -m benchmarks.summary: put the main figures of latest.json into README, between its two marks."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import Value, aim_of

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures of benchmarks/results/latest.json -->", "<!-- end of figures -->"

# What README shows: words, figures of one row, unit.
ROWS = (
    ("first token of 4,096 tokens, SmolLM2-135M: computed", ("ttft_recompute_ms_smollm2_4096",), "ms"),
    (
        "the same, hit in the pool by a new engine; hit on the device",
        ("ttft_pool_hit_ms_smollm2_4096", "ttft_device_hit_ms_smollm2_4096"),
        "ms",
    ),
    (
        "what the pool adds to a device hit, at most",
        ("ttft_pool_extra_ms_smollm2_4096", "ttft_pool_extra_bound_ms_smollm2_4096"),
        "ms",
    ),
    (
        "the same with 8,192 tokens of 229 KB (28 layers)",
        ("ttft_pool_extra_ms_kvheavy_8192", "ttft_pool_extra_bound_ms_kvheavy_8192"),
        "ms",
    ),
    ("speed-up of that prompt over computing", ("speedup_kvheavy_8192",), "x"),
    ("throughput with the connector and no hit, over without: 95 % interval", ("zero_hit_ratio_low", "zero_hit_ratio_high"), ""),
    ("memmove over put, over get (more is better)", ("local_put_vs_memcpy", "local_get_vs_memcpy"), ""),
    ("1,000 keys looked up among 50,000, among 500,000", ("exists_1000_ms", "exists_1000_ms_500000"), "ms"),
    ("first token of a hit, ExampleConnector over kvpool, 4,096 tokens", ("ttft_example_over_kvpool_4096",), "x"),
    ("the same, MooncakeStoreConnector over TCP", ("ttft_mooncake_over_kvpool_4096",), "x"),
    ("the same, LMCacheMPConnector", ("ttft_lmcache_over_kvpool_4096",), "x"),
    (
        "hit rate of the conversation trace, 10,000 blocks; exact LRU",
        ("hit_rate_conversation_10000", "hit_rate_lru_conversation_10000"),
        "%",
    ),
)


def rows(figures: dict[str, Value]) -> str:
    """The table: a figure that is null or missing is shown as such, one that misses its aim says so."""
    lines = ["| what | figure |", "|---|---:|"]
    for words, names, unit in ROWS:
        shown = []
        for name in names:
            value = figures.get(name)
            aim, met = aim_of(name, figures) if value is not None else ("", True)
            missed = f" (aim {aim})" if aim and not met else ""
            shown.append("not measured" if value is None else f"{value:.4g}{unit and ' ' + unit}{missed}")
        lines.append(f"| {words} | {', '.join(shown)} |")
    where = f"{figures.get('machine_cpu')}, {figures.get('machine_cores')} cores, {figures.get('date')}, {figures.get('commit')}"
    others = [f"{name.removesuffix('_commit')} at {value}" for name, value in figures.items() if _of_another(name, figures)]
    return "\n".join([*lines, "", f"On {where}{''.join(f'; {other}' for other in others)}."])


def _of_another(name: str, figures: dict[str, Value]) -> bool:
    """Is this the commit of a part that was measured at another one than the last?"""
    return name.endswith("_commit") and figures[name] != figures.get("commit")


def block(figures: dict[str, Value], text: str) -> str:
    """`text` with the table between its marks. ValueError when it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{rows(figures)}\n\n{END}{after}"


def main() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(block(figures, readme.read_text()))


if __name__ == "__main__":
    main()
