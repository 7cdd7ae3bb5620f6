"""Events of docs/reference/events.md against those of the code."""

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

from fastckpt._core.ipc.messages import Decided, OffloadEnded, OffloadMeasured, OffloadPlanned
from tests.unit._core.report.schema import table

ROOT = Path(__file__).parents[4]
STARRED = {
    "persist_failed": {"attempt"},
    "bad_checkpoint": {"history", "step", "tier"},
    "frequency": {field.name for field in fields(Decided)},
    "offload_planned": {field.name for field in fields(OffloadPlanned)},
    "offload_measured": {field.name for field in fields(OffloadMeasured)},
    "offload_ended": {field.name for field in fields(OffloadEnded)},
}
"""Fields that the code passes as a mapping."""


@cache
def emitted() -> dict[str, list[set[str]]]:
    """The names of all events in the code, and the fields of each place that writes one."""
    found: dict[str, list[set[str]]] = {}
    for path in [*ROOT.glob("fastckpt/**/*.py"), *ROOT.glob("fastckpt_run/**/*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"\b(event|stamp)\(", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("metrics.event", "event", "metrics.stamp"):
                starred = any(keyword.arg is None for keyword in node.keywords)
                for name in constants(node.args[0]):
                    fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                    found.setdefault(name, []).append(fields | (STARRED[name] if starred else set()))
    return found


def constants(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*constants(node.body), *constants(node.orelse)]
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return [node.value]


def test_events_of_the_code_and_of_the_documented_table_are_the_same():
    assert emitted().keys() == table().keys()


def test_fields_of_each_event_are_those_of_the_documented_table():
    for name, known in table().items():
        required = {field for field, (_, needed) in known.items() if needed}
        for given in emitted()[name]:
            if name != "events_lost" or given:  # else the line that a log writes of itself
                assert required <= given <= known.keys(), name
