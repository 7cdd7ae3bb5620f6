"""Comparison of two runs of a script: the values that they logged, and the checkpoints that both have made durable."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastckpt._core.format.manifest import VARYING
from fastckpt._core.inspect.checkpoint_files import CheckpointFiles, find
from fastckpt._core.inspect.diff import BitDistance, Change, Difference, Distance, diff_files
from fastckpt._core.inspect.inventory import InventoryItem, take
from fastckpt_run.proof.run_history import LoggedPlace, RunHistory, WorkerStart


@dataclass(frozen=True)
class ValueDifference:
    """A value that was logged otherwise.

    Attributes:
        of: Its step, rank and name.
        a: In the first run, as a number; None if it was not logged.
        b: In the other; of a step that was taken again, in the later execution.
        start: The process of the other run that logged it; None if none did.
        repeated: True if both are of the other run: a step that was taken again.
    """

    of: LoggedPlace
    a: float | None
    b: float | None
    start: WorkerStart | None = None
    repeated: bool = False


@dataclass(frozen=True)
class StateDifference:
    """A checkpoint that differs.

    Attributes:
        step: Its step.
        files: Differences by file; none for a file that only one run has.
        only: Files that one run alone has.
    """

    step: int
    files: Mapping[str, Difference]
    only: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, Distance]:
        """The tensors that differ, the file before each name."""
        return {f"{file}: {name}": d for file, found in self.files.items() for name, d in found.tensors.items()}

    @property
    def changes(self) -> list[tuple[str, Change]]:
        """Numbers and other values that differ, each with its file."""
        return [(file, change) for file, found in self.files.items() for change in found.changes]

    @property
    def names(self) -> list[str]:
        """Names that one state alone has, the file before each."""
        return [f"{file}: {name}" for file, found in self.files.items() for name in (*found.only_a, *found.only_b)]


@dataclass
class RunComparison:
    """The comparison of two runs.

    Attributes:
        values: Number of compared logged values.
        repeats: Number of values that the other run has logged more than once.
        value: The first value that differs.
        differing: Number of values that differ.
        same_input: True if another value of the step of the first difference was the same there, and differs later. It
            depends on the state, so that step's input was the same, and its update was not.
        steps: Steps of durable checkpoints that were compared.
        tensors: Tensors that were compared, in all of them.
        identical: Files that are equal byte for byte, of ``files``.
        state: The first checkpoint that differs.
        last: The last durable step of each run; None for none.
        unseeded: Global random generators that differ before any kill: their states are not compared.
    """

    values: int = 0
    repeats: int = 0
    value: ValueDifference | None = None
    differing: int = 0
    same_input: bool = False
    steps: list[int] = field(default_factory=list)
    tensors: int = 0
    identical: int = 0
    files: int = 0
    state: StateDifference | None = None
    last: tuple[int | None, int | None] = (None, None)
    unseeded: set[str] = field(default_factory=set)

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return self.value is None and self.state is None

    @property
    def first_step(self) -> int | None:
        """The first step at which something differs."""
        steps = [self.value.of.step] if self.value else []
        return min(steps + ([self.state.step] if self.state else []), default=None)


def compare_runs(a: RunHistory, b: RunHistory, folders: tuple[Path, Path], shm_dir: str) -> RunComparison:
    """Compare a run with another, which may have been interrupted.

    Args:
        a: The first.
        b: The other.
        folders: Below which each has its checkpoint directories.
        shm_dir: A tmpfs without arenas of these runs: only durable checkpoints are compared.
    """
    found = RunComparison(unseeded=a.unseeded(b))
    _compare_values(a, b, found)
    for directory in a.directories:
        name = Path(directory).relative_to(folders[0])
        other = folders[1] / name
        if other.is_dir():
            _compare_states(Path(directory), other, shm_dir, found)
        elif found.last[0] is None:
            found.last = (_newest(_durable(Path(directory), shm_dir)), None)
    return found


# --- values


def _compare_values(a: RunHistory, b: RunHistory, found: RunComparison) -> None:
    ours, theirs = a.counting(), b.counting()
    differences = [
        ValueDifference(of, _number(first), _number(later), start, repeated=True)
        for of, first, later, start in b.repeated()
    ]
    excused = set(b.loads)
    for of in ours.keys() | theirs.keys():
        value, (other, start) = ours.get(of), theirs.get(of, (None, None))
        if other is None and of.step in excused:
            continue  # it was killed after the save of the step and before it logged: a saved step is not repeated
        if value is None or other is None or value[0] != other:
            left = None if value is None else _number(value[0])
            differences.append(ValueDifference(of, left, None if other is None else _number(other), start))
    found.values = len(ours.keys() & theirs.keys())
    found.repeats = len({of for of, count in _executions(b).items() if count > 1})
    found.differing = len({each.of for each in differences})
    found.value = first = min(differences, key=lambda each: (each.of, each.repeated), default=None)
    if first is not None:
        rank = [each.of for each in differences if each.of.rank == first.of.rank and each.start is first.start]
        at_first = {of.name for of in rank if of.step == first.of.step}
        later = {of.name for of in rank if of.step > first.of.step} - at_first
        found.same_input = any(first.of._replace(name=name) in ours for name in later)


def _executions(history: RunHistory) -> dict[LoggedPlace, int]:
    counts = dict[LoggedPlace, int]()
    for rank, starts in history.starts.items():
        for start in starts:
            for step, name in start.values:
                counts[LoggedPlace(step, rank, name)] = counts.get(LoggedPlace(step, rank, name), 0) + 1
    return counts


def _number(text: str) -> float:
    return (
        float.fromhex(text)
        if text not in ("inf", "-inf", "nan")
        else {"inf": math.inf, "-inf": -math.inf}.get(text, math.nan)
    )


# --- checkpoints


def _durable(directory: Path, shm_dir: str) -> dict[int, InventoryItem]:
    """The newest whole checkpoint of each step on storage."""
    items = [item for item in take(str(directory), shm_dir).whole if item.tier == "storage" and item.step is not None]
    return {item.step: item for item in reversed(items) if item.step is not None}


def _newest(items: Mapping[int, InventoryItem]) -> int | None:
    # By the newest history: a run that began afresh has older steps after newer ones.
    return max(items, key=lambda step: items[step].id or (), default=None)


def _compare_states(a: Path, b: Path, shm_dir: str, found: RunComparison) -> None:
    ours, theirs = _durable(a, shm_dir), _durable(b, shm_dir)
    found.last = (_newest(ours), _newest(theirs))
    for step in sorted(ours.keys() & theirs.keys()):
        left, right = (
            find(f"{directory}@{step}.{items[step].history}:storage", shm_dir)
            for directory, items in ((a, ours), (b, theirs))
        )
        found.steps.append(step)
        difference = _compare_checkpoint(step, left, right, found)
        if difference is not None and (found.state is None or step < found.state.step):
            found.state = difference
            return


def _compare_checkpoint(
    step: int, left: CheckpointFiles, right: CheckpointFiles, found: RunComparison
) -> StateDifference | None:
    only = sorted(left.files.keys() ^ right.files.keys())
    files = dict[str, Difference]()
    for name in left.files.keys() & right.files.keys():
        a, b = left.files[name], right.files[name]
        found.files += 1
        # Digests are of the same bytes that are compared otherwise, and were checked when these became durable.
        if a.digest and a.digest == b.digest and not a.parts:
            found.identical += 1
            continue
        difference = diff_files(a, b, kind=BitDistance)
        found.tensors += difference.compared
        _leave_out(difference, (*VARYING, *(f"rng.{generator}" for generator in found.unseeded)))
        if difference:
            files[name] = difference
    return StateDifference(step, dict(sorted(files.items())), only) if files or only else None


def _leave_out(difference: Difference, beginnings: tuple[str, ...]) -> None:
    """Leave out changes that are usual between two runs."""
    difference.changes = [change for change in difference.changes if not change.name.startswith(beginnings)]
    difference.tensors = {n: found for n, found in difference.tensors.items() if not n.startswith(beginnings)}
    for names in (difference.only_a, difference.only_b):
        names[:] = [each for each in names if not each.startswith(beginnings)]
