"""`fastckpt top` in a terminal: nothing is broken at 80 columns, and there is colour unless NO_COLOR asks for none."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastckpt_run.views.top_text import TextTable, Toned, blocks
from tests.cli.terminals import Terminal
from tests.cli.test_docs import page_of_a_job

RECORDED = Path(__file__).with_name("recorded_status.json")


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    """The page of a job whose state was recorded."""
    with page_of_a_job(tmp_path / "live") as url:
        yield url


def test_a_terminal_of_80_columns_has_each_worker_in_one_line_and_colour(url):
    shown = Terminal(["top", url, "--once"], columns=80).finish()
    lines = shown.screen
    assert shown.code == 0 and max(map(len, lines)) <= 80
    (head,) = (number for number, line in enumerate(lines) if line.split()[:1] == ["RANK"])
    assert lines[head].split()[-1] == "REST" and "PROCESS" not in lines[head]
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["0", "1"]
    assert "rank 1 is slow: data, costs 197%" in lines[:head]
    assert "\x1b[1;32mtrain.py trains" in shown.raw and "\x1b[33mrank 1 is slow" in shown.raw
    assert "\x1b[1;31mrank 1 on node1 is slow" in shown.raw, "an alarm among the events"


def test_columns_that_say_least_are_left_out_first_and_trouble_never():
    document = json.loads(RECORDED.read_text())
    document["nodes"][0]["tiers"][0]["trouble"] = "storage is full"
    heads = {
        width: [[name.lstrip(">") for name in block.columns] for block in blocks(document, width) if _is_table(block)]
        for width in (40, 80, 200)
    }
    assert heads[40][0] == ["RANK", "DOING", "STEP", "HEARTBEAT"]
    assert "TROUBLE" in heads[40][2] and "REMOTE" not in heads[40][2]
    assert "PROCESS" in heads[200][0] and "NODE" in heads[200][2]
    (trouble,) = (cell for block in blocks(document, 40) if _is_table(block) for row in block.rows for cell in row[-1:]
                  if cell == "storage is full")  # fmt: skip
    assert isinstance(trouble, Toned) and trouble.tone == "bad"


def _is_table(block: object) -> bool:
    return isinstance(block, TextTable)
