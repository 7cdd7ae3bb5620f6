"""The alert rules and the dashboard of docs/operate/watch: expressions on metrics and labels that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import yaml

from fastckpt._core.report.metric_table import BY_NAME, LABEL_VALUES, Kind

FOLDER = Path(__file__).parents[4] / "docs/operate/watch"
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((FOLDER / "grafana.json").read_text())
TARGETS = [target for panel in BOARD["panels"] if panel["type"] != "row" for target in panel["targets"]]
OF_SCRAPES = {"job", "instance"}
"""Labels that Prometheus adds."""
HISTOGRAM = re.compile("(.+)_(bucket|sum|count)")


def selectors(expression: object) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (inner := getattr(expression, name, None)) is not None:
            yield from selectors(inner)
    for argument in getattr(expression, "args", ()):
        yield from selectors(argument)


def metric_of(name: str):
    """The row of the table, and the labels, of a series."""
    if found := HISTOGRAM.fullmatch(name):
        assert BY_NAME[found[1]].kind is Kind.HISTOGRAM
        return BY_NAME[found[1]], {"le"}
    assert BY_NAME[name].kind is not Kind.HISTOGRAM
    return BY_NAME[name], set[str]()


def check(text: str) -> set[str]:
    """Check an expression; returns all labels that its metrics have."""
    own = OF_SCRAPES.copy()
    found = [*selectors(promql_parser.parse(text))]
    assert found, text
    for selector in found:
        metric, more = metric_of(selector.name)
        labels = {*metric.labels, *more, *OF_SCRAPES}
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, text
            assert matcher.name not in LABEL_VALUES or matcher.value in LABEL_VALUES[matcher.name], text
        own |= labels
    for names in re.findall(r"\b(?:by|on|group_left|group_right|ignoring|without) \(([^)]*)\)", text):
        assert {name.strip() for name in names.split(",") if name.strip()} <= own, text
    return own


def test_alerts_are_on_metrics_that_there_are():
    page = (FOLDER.parent / "watch.md").read_text()
    assert len(RULES) == 10
    for rule in RULES:
        labels = check(rule["expr"])
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
        assert rule["labels"]["severity"] in ("page", "ticket") and f"| `{rule['alert']}` |" in page


def test_panels_are_on_metrics_that_there_are_and_counters_have_a_rate():
    for target in TARGETS:
        labels = check(target["expr"].replace("$__rate_interval", "1m"))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
    for text in [rule["expr"] for rule in RULES] + [target["expr"] for target in TARGETS]:
        bare = re.sub(r"(rate|increase)\([^[]*\[[^]]*\]\)", "", text)
        counters = {name for name in re.findall(r"\bfastckpt_\w+", bare) if name.endswith("_total")}
        assert counters <= {"fastckpt_restarts_total"}, text  # since the agent began
