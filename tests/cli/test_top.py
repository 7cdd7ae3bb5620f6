"""`fastckpt top` in narrow and wide terminals."""

import json
from pathlib import Path
from typing import Any

from fastckpt_run.views.top_text import TextTable, Toned, blocks


def tables(document: dict[str, Any], width: int) -> list[TextTable]:
    return [block for block in blocks(document, width) if isinstance(block, TextTable)]


def test_columns_that_say_least_are_left_out_first_and_trouble_never():
    document = json.loads(Path(__file__).with_name("recorded_status.json").read_text())
    document["nodes"][0]["tiers"][0]["trouble"] = "storage is full"
    narrow, wide = ([[name.lstrip(">") for name in each.columns] for each in tables(document, w)] for w in (40, 200))
    assert narrow[0] == ["RANK", "DOING", "STEP", "HEARTBEAT"]
    assert "TROUBLE" in narrow[2] and "REMOTE" not in narrow[2]
    assert "PROCESS" in wide[0] and "NODE" in wide[2]
    lasts = [row[-1] for each in tables(document, 40) for row in each.rows]
    (trouble,) = (cell for cell in lasts if cell == "storage is full")
    assert isinstance(trouble, Toned) and trouble.tone == "bad"
