"""The table of metrics, and its documentation."""

import re
from pathlib import Path

from fastckpt._core.report import goodput
from fastckpt._core.report.metric_table import LABEL_VALUES, METRICS

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
