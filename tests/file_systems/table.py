"""The table of docs/clusters/file_systems.md, from what the campaign has recorded.

``python -m tests.file_systems.table`` writes it.
"""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs/clusters/file_systems.md"
HEAD = "| file system | renames that a reader missed | else |"

WARNED = ("tmpfs", "overlay, volatile")
"""Those of which a job is told that they forget what was synced when the machine crashes."""


def slug(name: str) -> str:
    return re.sub(r"\W+", "_", name).lower()


def record(name: str, **found: str | int) -> None:
    """Keep what a run has found of a file system, with what other runs have."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{slug(name)}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"name": name} | found, indent=1) + "\n")


def results() -> list[dict[str, str]]:
    found = (json.loads(path.read_text()) for path in RESULTS.glob("*.json"))
    return sorted(found, key=lambda result: result["name"].lower())


def row(result: dict[str, str]) -> str:
    missed, _, tried = result["rename"].removeprefix("missed ").partition(" of ")
    others = [f"{key}: {result[key]}" for key in ("O_DIRECT", "flock", "fsync", "hard links") if result[key] != "yes"]
    others += ["a warning"] * (result["name"] in WARNED) + ["no job was killed"] * ("jobs killed" not in result)
    return f"| {result['name']} ({result['version']}) | {missed} of {tried} | {', '.join(others)} |"


def table() -> str:
    lines = [HEAD, re.sub("[^|]+", " --- ", HEAD), *map(row, results())]
    return "\n".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(r"\| file system \| renames.*?\n(?!\|)", lambda _: table() + "\n", text, flags=re.DOTALL))
