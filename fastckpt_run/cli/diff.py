"""`fastckpt diff`: how two checkpoints differ, in structure and in values."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fastckpt._core.config import Settings
from fastckpt._core.format.manifest import MODEL, VARYING
from fastckpt._core.inspect.checkpoint_files import CheckpointFiles, find
from fastckpt._core.inspect.work_progress import WorkObserver
from fastckpt.errors import ConfigError
from fastckpt_run.cli.output import FINDING, CommandOutput, Screen, answering, number, shortened
from fastckpt_run.cli.progress import observed
from fastckpt_run.formatting import count

if TYPE_CHECKING:
    from fastckpt._core.inspect.diff import Difference


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--file", "names", multiple=True, metavar="NAME", help="Compare this file only, such as model.pt.")
@answering
@observed
def diff(a: str, b: str, names: tuple[str, ...], observer: WorkObserver) -> CommandOutput:
    """Compare two checkpoints: names, types, shapes, values.

    A and B are each DIR[@STEP], a directory of .pt files, or one file. NaN equals NaN. Shared storages and devices do
    not count. Exit code 1: they differ.
    """
    from fastckpt._core.inspect.diff import diff_all

    shm_dir = Settings.from_environment().arenas
    left, right = find(a, shm_dir), find(b, shm_dir)
    pairs, only_a, only_b = _pairs(left, right, names)
    files = {name: (left.files[in_a], right.files[in_b]) for name, (in_a, in_b) in pairs.items()}
    differences = diff_all(files, observer)
    # After the comparison: memory may have been reused meanwhile, and the difference would be another save's.
    left.check_unchanged()
    right.check_unchanged()
    equal = not (only_a or only_b or any(differences.values()))
    document = {
        "a": left.name,
        "b": right.name,
        "equal": equal,
        "only_a": only_a,
        "only_b": only_b,
        "files": [{"name": name, **_to_json(difference)} for name, difference in differences.items()],
    }

    def show(screen: Screen) -> None:
        for side, files in ((a, only_a), (b, only_b)):
            screen.line(f"only in {side}: {', '.join(files)}") if files else None
        for name, difference in differences.items():
            _show(screen, name, difference)

    return CommandOutput(document, show, 0 if equal else FINDING)


Pairs = dict[str, tuple[str, str]]


def _pairs(left: CheckpointFiles, right: CheckpointFiles, names: tuple[str, ...]) -> tuple[Pairs, list[str], list[str]]:
    """Pairs of files to compare, and the files that one side alone has."""
    if names:
        for name in names:
            left.file(name), right.file(name)
        return {name: (name, name) for name in names}, [], []
    for one, other in ((left, right), (right, left)):
        if one.is_file:
            [name] = one.files
            partner = _partner(name, other)
            return {name: (name, partner) if one is left else (partner, name)}, [], []
    common = [name for name in left.files if name in right.files]
    return (
        {name: (name, name) for name in common},
        [name for name in left.files if name not in right.files],
        [name for name in right.files if name not in left.files],
    )


def _partner(name: str, other: CheckpointFiles) -> str:
    """The file to compare a single file with: the one there is, the one of its name, or the model."""
    if len(other.files) == 1:
        return next(iter(other.files))
    found = next((choice for choice in (name, MODEL) if choice in other.files), None)
    if found is None:
        raise ConfigError(
            f"{other.name} has neither {name} nor {MODEL} to compare with; it has {', '.join(other.files)}"
        )
    return found


def _to_json(difference: "Difference") -> dict[str, Any]:
    return {
        "equal": not difference,
        "compared": difference.compared,
        "only_a": difference.only_a,
        "only_b": difference.only_b,
        "changes": [asdict(change) for change in difference.changes],
        "tensors": [
            {"name": name, **asdict(distance), "max_abs": number(distance.max_abs)}
            for name, distance in difference.tensors.items()
        ],
    }


def _show(screen: Screen, name: str, difference: "Difference") -> None:
    state = "differ" if difference else "equal"
    screen.line(f"{name}: {state} ({difference.compared} tensors compared, {len(difference.tensors)} differ)")
    for mark, names in (("-", difference.only_a), ("+", difference.only_b)):
        for missing in names:
            screen.line(f"  {mark} {missing}")
    own = [change for change in difference.changes if change.name.startswith(VARYING)]
    for change in difference.changes:
        if change not in own:
            screen.line(f"  {change.name}: {change.what} {shortened(str(change.a))} -> {shortened(str(change.b))}")
    if own:
        screen.line(f"  {count(len(own), 'value')} of how often to save, and of what that costs: --json has them")
    if difference.tensors:
        rows = [
            [name, "?" if d.max_abs is None else f"{d.max_abs:.6g}", str(d.differing), str(d.count), str(d.nans)]
            for name, d in difference.tensors.items()
        ]
        screen.table(["TENSOR", ">MAX ABS DIFFERENCE", ">DIFFERING", ">OF", ">NAN IN ONE"], rows)
