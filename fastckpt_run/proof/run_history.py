"""The history of one run, as its workers have recorded it: the loads, logged values and saves of each process."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Value = str
"""A number as text: hexadecimal, so that it is exact."""


class LoggedPlace(NamedTuple):
    """Step, rank and name of one value; in order of steps."""

    step: int
    rank: int
    name: str


@dataclass
class WorkerStart:
    """One process of a rank.

    Attributes:
        loaded: The step that it resumed; None if it resumed none.
        tier: Tier of the checkpoint.
        fresh: True if it asked for a checkpoint and there was none.
        values: The last value of each name at each step.
        generators: Digests of the states of the global random generators at its first save, by name.
        saved: Steps that it has saved.
    """

    loaded: int | None = None
    tier: str = ""
    fresh: bool = False
    values: dict[tuple[int, str], Value] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Steps that it has named after its load, in order."""
        return sorted({step for step, _ in self.values} | set(self.saved))


@dataclass
class RunHistory:
    """All processes of a run, by rank.

    Attributes:
        starts: The processes of each rank, in order.
        directories: The checkpoint directories that it opened.
        outside: A directory that is not below the run's; empty if there is none.
    """

    starts: dict[int, list[WorkerStart]] = field(default_factory=lambda: defaultdict(list))
    directories: list[str] = field(default_factory=list)
    outside: str = ""

    @property
    def saved(self) -> list[int]:
        """All steps that were saved."""
        return sorted({step for start in self._all() for step in start.saved})

    @property
    def last(self) -> int:
        """The last step that any process has named."""
        return max((step for start in self._all() for step in start.steps), default=0)

    @property
    def logs(self) -> bool:
        """True if the script logs values."""
        return any(start.values for start in self._all())

    @property
    def loads(self) -> list[int]:
        """The steps that were resumed."""
        return sorted({start.loaded for start in self._all() if start.loaded is not None})

    def unseeded(self, other: "RunHistory") -> set[str]:
        """Global random generators that differ from another run's at the first save, before any kill."""
        found = set[str]()
        for rank in self.starts.keys() & other.starts.keys():
            ours, theirs = self.starts[rank][0].generators, other.starts[rank][0].generators
            found |= {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
        return found

    def counting(self) -> dict[LoggedPlace, tuple[Value, WorkerStart]]:
        """The values that count, those of the last process that took a step, and that process."""
        found = dict[LoggedPlace, tuple[Value, WorkerStart]]()
        for rank, starts in self.starts.items():
            for start in starts:
                found |= {LoggedPlace(step, rank, name): (value, start) for (step, name), value in start.values.items()}
        return found

    def repeated(self) -> Iterator[tuple[LoggedPlace, Value, Value, WorkerStart]]:
        """Values of steps that were taken again and gave another value: the first, the later one, by which process."""
        for rank, starts in self.starts.items():
            first = dict[tuple[int, str], Value]()
            for start in starts:
                for (step, name), value in start.values.items():
                    if first.setdefault((step, name), value) != value:
                        yield LoggedPlace(step, rank, name), first[step, name], value, start

    def _all(self) -> Iterator[WorkerStart]:
        return (start for starts in self.starts.values() for start in starts)


def read_history(folder: Path) -> RunHistory:
    """Read the records of a run; a line that its process did not finish is left out."""
    history = RunHistory()
    for path in sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:])):
        starts = history.starts[int(path.stem[5:])]
        for line in _lines(path):
            if line["what"] == "begun":
                starts.append(WorkerStart())
            elif line["what"] == "opened":
                _open(history, line)
            elif starts:
                _take(starts[-1], line)
    return history


def _open(history: RunHistory, line: dict[str, Any]) -> None:
    directory = str(line["directory"])
    if not line["within"]:
        history.outside = directory
    elif directory not in history.directories:
        history.directories.append(directory)


def _take(start: WorkerStart, line: dict[str, Any]) -> None:
    match line["what"]:
        case "loaded":
            start.loaded, start.tier = line["step"], line["tier"]
        case "fresh":
            start.fresh = True
        case "logged":
            start.values |= {(line["step"], name): value for name, value in line["values"].items()}
        case "generators":
            start.generators = line["states"]
        case "saved":
            start.saved.append(line["step"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
