"""The figures as one picture."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.report import Value


def draw(figures: dict[str, Value], path: Path) -> None:
    """Four panels: TTFT by prompt length, extra time of a pool hit and its bound, peers, hit rates. Needs matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("bench: no picture: matplotlib is not installed (extra [bench])", flush=True)
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    _lines(
        axes[0][0], figures, "ttft_{}_ms_smollm2_", ["recompute", "pool_hit", "device_hit"], "first token, SmolLM2: ms by tokens"
    )
    extra = ["extra_ms_kvheavy", "extra_bound_ms_kvheavy"]
    _lines(axes[0][1], figures, "ttft_pool_{}_", extra, "pool hit over device hit, 229 KB of KV a token: ms")
    peers = ["kvpool", "example", "mooncake", "lmcache"]
    _lines(axes[1][0], figures, "peer_{}_hit_ms_", peers, "first token of a hit in a new engine: ms by tokens")
    traces = ["conversation", "synthetic", "lru_conversation", "lru_synthetic"]
    _lines(axes[1][1], figures, "hit_rate_{}_", traces, "hit rate, store and exact LRU: % by blocks")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _lines(axis, figures: dict[str, Value], form: str, names: list[str], title: str) -> None:  # noqa: ANN001 - an Axes, imported late
    """One line for each name: the figures `form<number>`."""
    for name in names:
        pattern = re.compile(re.escape(form.format(name)) + r"(\d+)")
        found = [(int(m[1]), value) for key, value in figures.items() if (m := pattern.fullmatch(key)) and value is not None]
        if found:
            axis.plot(*zip(*sorted(found), strict=True), marker="o", label=name.replace("_", " "))
    axis.set_title(title)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend()
