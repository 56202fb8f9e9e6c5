"""The dashboard, the alert rules and docs/metrics.md speak of metrics and labels that exist, and of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kvpool.engine.document_metrics import document
from kvpool.engine.metric_table import ENGINE_LABELS, METRICS
from kvpool.engine.p2p.metric_table import TRANSFER_METRICS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "kvpool.json"
RULES = ROOT / "deploy" / "prometheus" / "kvpool-alerts.yaml"
FUNCTIONS = {"rate", "increase", "histogram_quantile", "label_values", "clamp_min"}
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
OPERATORS = {"and", "or", "unless"}
SCRAPE_LABELS = {"instance", "job"}  # that Prometheus adds
TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[(?:\d+[smhdw]|\$__rate_interval)\])|(?P<number>\d[\d.]*(?:e\d+)?)'
    r"|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<op>=~|!~|!=|==|>=|<=|[-+*/(){},<>=]))"
)
EXPORTED = {
    name: {*metric.labels, *({"le"} if name.endswith("_bucket") else ())} for metric in METRICS.values() for name in metric.exported
}
COUNTERS = {name for metric in METRICS.values() if metric.kind != "gauge" for name in metric.exported}


class PromQLError(ValueError):
    """An expression that Prometheus, or an operator, could not make sense of."""


def vllm_names() -> set[str]:
    """The names in vLLM's own table of metrics."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    return set(re.findall(r'name="(vllm:[a-z_]+)"', text))


def tokens_of(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise PromQLError(f"cannot read {text[at : at + 20]!r}")
        kind = str(match.lastgroup)
        found.append((kind, match[kind]))
        at = match.end()
    return found


class Expression:
    """Just enough PromQL: brackets that match, every name a function, an operator, or a metric with labels that it has."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens_of(text)
        self._at = 0
        self._grouped: set[str] = set()
        self._labels: set[str] = set()
        self.metrics: set[str] = set()
        depth = 0
        while self._at < len(self._tokens):
            depth += self._one()
            if depth < 0:
                raise PromQLError("a bracket is closed that was not opened")
        if depth:
            raise PromQLError("a bracket is not closed")
        wrong = self._grouped - self._labels - set(ENGINE_LABELS) - SCRAPE_LABELS
        if wrong:
            raise PromQLError(f"grouped by {sorted(wrong)}, which none of {sorted(self.metrics)} has")

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise PromQLError("ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _one(self) -> int:
        kind, text = self._next()
        if kind == "name":
            self._name(text)
        elif text in "{}":
            raise PromQLError("labels without a metric")
        return {"(": 1, ")": -1}.get(text, 0) if kind == "op" else 0

    def _name(self, text: str) -> None:
        if text in OPERATORS:
            return
        if text in AGGREGATIONS:
            if self._peek() == "by":
                self._next()
                self._grouped |= set(self._list())
            if self._peek() != "(":
                raise PromQLError(f"{text} of nothing")
        elif text in FUNCTIONS:
            if self._peek() != "(":
                raise PromQLError(f"{text} is a function")
        else:
            self._metric(text)

    def _list(self) -> Iterator[str]:
        if self._next()[1] != "(":
            raise PromQLError("by needs a list")
        while (token := self._next())[1] != ")":
            if token[1] != ",":
                yield token[1]

    def _metric(self, name: str) -> None:
        if name.startswith("vllm:"):
            base = re.sub(r"_(total|bucket|sum|count)$", "", name)
            if base not in vllm_names():
                raise PromQLError(f"vLLM has no {name}")
            labels = {"le"}
        elif name in EXPORTED:
            labels = EXPORTED[name]
        else:
            raise PromQLError(f"there is no metric {name!r}")
        self.metrics.add(name)
        self._labels |= labels
        for label in self._selector():
            if label not in labels | set(ENGINE_LABELS) | SCRAPE_LABELS:
                raise PromQLError(f"{name} has no label {label!r}")
        ranged = self._at < len(self._tokens) and self._tokens[self._at][0] == "range"
        if ranged != (name in COUNTERS or name.startswith("vllm:")):
            raise PromQLError(f"{name}: a counter needs a range, a gauge none")

    def _selector(self) -> Iterator[str]:
        if self._peek() != "{":
            return
        self._next()
        while self._peek() != "}":
            label, op, (kind, _) = self._next()[1], self._next()[1], self._next()
            if op not in ("=", "!=", "=~", "!~") or kind != "string":
                raise PromQLError(f"label {label}: cannot read its matcher")
            yield label
            if self._peek() == ",":
                self._next()
        self._next()


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("text", dashboard_expressions())
def test_the_dashboard_asks_for_what_exists(text):
    assert Expression(text).metrics
    assert 'model_name=~"$model_name"' in text, "the variables apply to each panel"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_the_alerts_ask_for_what_exists(rule):
    expression = Expression(rule["expr"])
    assert expression.metrics
    told = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
    assert set(told) <= expression._grouped, "a label in the text that the expression does not keep"
    assert rule["labels"]["severity"] in ("info", "warning")
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(rate(kvpool:hits_totl[5m]))",
        "sum(rate(kvpol:hits_total[5m]))",
        "sum(rate(kvpool:hits[5m]))",
        'sum(rate(kvpool:misses_total{raeson="absent"}[5m]))',
        "sum by (tier) (rate(kvpool:misses_total[5m]))",
        "sum by (reason) (rate(kvpool:misses_total[5m])",
        "sum(rate(kvpool:misses_total[5m])))",
        "summ(rate(kvpool:misses_total[5m]))",
        "rate(vllm:time_to_first_tokn_seconds_bucket[5m])",
        "kvpool:misses_total",
        "rate(kvpool:breaker_state[5m])",
        "sum(rate(kvpool:misses_total{reason=absent}[5m]))",
        "sum by (le) (rate(kvpool:lookup_seconds_sum[5m]))",
        "sum(rate(kvpool:misses_total[5q]))",
    ],
)
def test_a_typing_error_is_found(wrong):
    with pytest.raises(PromQLError):
        Expression(wrong)


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    used = {name for text in dashboard_expressions() + [rule["expr"] for rule in rules()] for name in Expression(text).metrics}
    missing = {metric.name for metric in METRICS.values() if not used & set(metric.exported)}
    assert missing == {"loads", "saves", "saved_blocks", "known_blocks"}, "and these only say again what others say"


def test_shared_gauges_are_never_summed_over_engines():
    for text in dashboard_expressions() + [rule["expr"] for rule in rules()]:
        shared = [name for metric in METRICS.values() if metric.shared for name in metric.exported if name in text]
        assert not shared or "sum" not in text, text


def test_the_dashboard_can_be_imported():
    whole = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(whole)
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    names = {variable["name"] for variable in whole["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"} == names
    for variable in whole["templating"]["list"]:
        if variable["type"] == "query":
            Expression(re.sub(r"label_values\((\S+), (\w+)\)", r"sum by (\2) (rate(\1[5m]))", variable["query"]["query"]))
    rows = [panel["title"] for panel in whole["panels"] if panel["type"] == "row"]
    assert rows == ["Is it helping?", "Why not?", "Speed by tier", "Fill and evictions", "Trouble"]
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def test_the_reference_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text() == document(), (
        "run: python -m kvpool.engine.document_metrics > docs/metrics.md"
    )


def test_documents_name_only_metrics_that_exist():
    every = [*METRICS.values(), *TRANSFER_METRICS.values()]
    known = {name for metric in every for name in (*metric.exported, "kvpool:" + metric.name)}
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for name in re.findall(r"kvpool:[a-z_]+", path.read_text()):
            assert name in known or name == "kvpool:store_", f"{path.name}: {name}"
