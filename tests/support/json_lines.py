"""Reading lines of JSON that another process is writing."""

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are written whole: one more may be under way. None are if there is no file yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
