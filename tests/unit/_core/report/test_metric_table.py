"""The table of metrics: its names, its documentation, and that each place that shows metrics shows these."""

import re
from pathlib import Path

import pytest

from fastckpt._core.report import goodput
from fastckpt._core.report.measured import Measured
from fastckpt._core.report.metric_table import BY_NAME, LABEL_VALUES, METRICS, parse_key
from fastckpt._core.report.report import report
from tests.unit._core.report.stories import Story

DOCS = Path(__file__).parents[4] / "docs"
HEAD = "| metric | kind | from | meaning |\n| --- | --- | --- | --- |\n"


def rows() -> str:
    """The table of docs/reference/metrics.md."""
    lines = []
    for each in METRICS:
        labels = f"{{{', '.join(each.labels)}}}" if each.labels else ""
        lines.append(f"| `{each.name}{labels}` | {each.kind.value} | {each.scope.value} | {each.help} |\n")
    return HEAD + "".join(lines)


def test_the_documented_table_is_the_table():
    assert (DOCS / "reference" / "metrics.md").read_text().partition(HEAD)[2] == rows().partition(HEAD)[2]


def test_causes_are_those_of_the_documented_accounting():
    assert sorted([goodput.USEFUL, *LABEL_VALUES["cause"]]) == sorted(goodput.CAUSES)
    text = (DOCS / "reference" / "events.md").read_text().partition("## Time accounting")[2]
    named = re.findall(r"^\| ([\w -]+?)(?: \(`(\w+)`\))? \| ", text, re.MULTILINE)
    words = {code or name.replace("-", "") for name, code in named} - {"cause", ""}
    assert words == set(goodput.CAUSES)


@pytest.mark.parametrize("labels", [("a", "0"), ('"q\\"', "\n,}"), ("", "=")])
def test_a_key_is_read_as_it_was_written(labels):
    metric = BY_NAME["fastckpt_user"]
    assert parse_key(metric.key(labels)) == ("fastckpt_user", dict(zip(metric.labels, labels, strict=True)))
    assert parse_key("fastckpt_step") == ("fastckpt_step", {})


def test_the_report_takes_the_last_values_of_each_node_and_none_that_are_no_values():
    def told(pid: int, node: int, **values: object) -> Story:
        story = Story(node=node, pid=pid).starts(1, 2, 3, 4)
        story.at(5, "metrics", step=1, values={"fastckpt_step": 1})
        return story.at(6, "metrics", step=7, values={f"fastckpt_{name}": value for name, value in values.items()})

    odd = {"loss": "NaN", "text": "many", "flag": True, "huge": 1e301, "list": [1], "x" * 500: 1}
    found = report([told(1, 0, step=7, **odd).log, told(2, 1, step=8).log]).metrics
    assert [(one.node, one.step, one.values) for one in found] == [
        (0, 7, {"fastckpt_step": 7, "fastckpt_loss": "NaN"}),
        (1, 7, {"fastckpt_step": 8}),
    ]
    broken = Story().at(1, "metrics", step="x", values=[1])
    assert [(one.step, one.values) for one in report([broken.log]).metrics] == [(0, {})]


def test_the_report_shows_what_the_first_rank_logged():
    keys = [BY_NAME["fastckpt_user"].key(labels) for labels in (("loss", "3"), ("b", "2"), ("loss", "2"), ("x", "?"))]
    found = Measured(0, 0, 7, dict(zip(keys, (1.0, 2.0, "NaN", 4.0), strict=True)))
    assert found.logged() == {"b": 2.0, "loss": "NaN"}
    assert Measured(0, 0, 7, {}).logged() == {}
