"""Results of benchmarks: one file of JSON lines each, in which runs of several days and versions stand side by side."""

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/evidence/benchmarks"


@dataclass
class Run:
    """Measurements of all contenders by turns, on one machine, on one day.

    ``samples`` has a row for each turn: contender, round, seconds of the turn, and lists of values by quantity.
    ``missing`` has the reasons of contenders that could not run.
    """

    label: str
    command: str
    day: str
    is_quick: bool
    gigabytes: float
    machine: dict[str, Any]
    versions: dict[str, str]
    samples: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def rounds(self, name: str) -> dict[int, list[float]]:
        """The values of "CONTENDER.QUANTITY" by round."""
        contender, _, quantity = name.rpartition(".")
        found: dict[int, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample["contender"] == contender and sample["values"].get(quantity):
                found[sample["round"]] += sample["values"][quantity]
        return dict(found)

    def values(self, name: str) -> list[float]:
        """All values of "CONTENDER.QUANTITY"."""
        return [value for values in self.rounds(name).values() for value in values]


def path_of(name: str) -> Path:
    """The file of a benchmark's results: a line for each run, followed by one for each of its turns."""
    return FOLDER / f"{name}.jsonl"


def load(name: str) -> list[Run]:
    """The recorded runs of a benchmark, oldest first; none if it was never recorded."""
    runs: list[Run] = []
    for line in path_of(name).read_text().splitlines() if path_of(name).exists() else ():
        values = json.loads(line)
        if "contender" in values:
            runs[-1].samples.append(values)
        else:
            runs.append(Run(**values))
    return runs


def is_writable() -> bool:
    """Return whether runs can be recorded here: asked before they are made, which may take hours."""
    try:
        FOLDER.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(FOLDER, os.W_OK)


def record(name: str, run: Run) -> None:
    """Add a run to those that were recorded."""
    head = asdict(run)
    samples = head.pop("samples")
    with path_of(name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [head, *samples])
