"""Text of `fastckpt prove`: the kills, the comparison, the first difference and its likely causes."""

from collections.abc import Iterator

from fastckpt_run.cli.output import Screen
from fastckpt_run.formatting import count, duration
from fastckpt_run.proof.proof import Proof
from fastckpt_run.proof.run_comparison import RunComparison, StateDifference, ValueDifference

_MOST = 5
"""Tensors, and other values, of a checkpoint that are shown."""


def show(screen: Screen, proof: Proof) -> None:
    """The result, for people."""
    rows = [
        [str(kill.number), kill.kind, str(kill.rank), str(note["step"]), str(note["phase"])]
        for kill, note in proof.kills
        if note is not None
    ]
    screen.table([">KILL", "KIND", ">RANK", ">STEP", "PHASE"], rows)
    for line in _lines(proof):
        screen.line(line)


def _lines(proof: Proof) -> Iterator[str]:
    for rank, starts in sorted(proof.killed.history.starts.items()):
        loads = [f"{start.loaded} ({start.tier})" for start in starts if start.loaded is not None]
        yield f"rank {rank} resumed steps {', '.join(loads)}" if loads else f"rank {rank} resumed nothing"
    yield from compared(proof.found)
    if proof.killed.code:
        yield f"the run with kills ended with exit code {proof.killed.code}:"
        yield from (f"| {line}" for line in proof.killed.output)
    yield from differences(proof.found)
    if proof.again is not None and not proof.again.equal:
        yield "two runs without kills differ, too:"
        yield from (f"  {line}" for line in differences(proof.again))
    yield from (f"cause {number}: {cause.name}: {cause.text}" for number, cause in enumerate(proof.causes, 1))
    yield from (f"note: {note}" for note in proof.notes)
    yield verdict(proof)


def verdict(proof: Proof) -> str:
    """The answer in a line."""
    kills = count(sum(note is not None for _, note in proof.kills), "kill")
    if proof.proven:
        took = duration(round((proof.plain.seconds + proof.killed.seconds) * 1e9))
        return f"PROVEN: with {kills} the script gives the same, bit for bit (two runs, {took})"
    if proof.killed.code:
        return f"NOT PROVEN: with {kills} the script does not come to its end"
    if proof.found.equal:
        return f"NOT RESUMED: with {kills} the script gives the same only because it began again"
    return f"NOT EQUAL: with {kills} the script does not give the same"


def compared(found: RunComparison) -> Iterator[str]:
    """Describe the comparison."""
    repeats = f", of which {found.repeats:,} were computed more than once" if found.repeats else ""
    yield f"{count(found.values, 'logged value')} compared{repeats}: {found.differing:,} differ"
    steps = ", ".join(map(str, found.steps[:10])) + (", ..." if len(found.steps) > 10 else "")
    if found.steps:
        files = f"{count(found.tensors, 'tensor')} in {count(found.files - found.identical, 'file')}"
        same = f", and {count(found.identical, 'file')} that are the same byte for byte" if found.identical else ""
        yield f"checkpoints of {count(len(found.steps), 'step')} compared ({steps}), bit by bit: {files}{same}"


def differences(found: RunComparison) -> Iterator[str]:
    """The first differences."""
    if found.value is not None:
        yield f"first value: {_value(found.value)}"
    if found.state is not None:
        yield from _state(found.state)


def _value(one: ValueDifference) -> str:
    at = f"step {one.of.step}, {one.of.name} of rank {one.of.rank}"
    if one.repeated:
        return f"{at}: {one.a!r} at first, and {one.b!r} when the step was taken again"
    shown = ["not logged" if value is None else repr(value) for value in (one.a, one.b)]
    apart = "" if one.a is None or one.b is None else f" ({abs(one.a - one.b):.3g} apart)"
    after = "" if one.start is None or one.start.loaded is None else f", after step {one.start.loaded} was resumed"
    return f"{at}: {shown[0]}, and {shown[1]} in the other run{apart}{after}"


def _state(one: StateDifference) -> Iterator[str]:
    for name in one.only:
        yield f"first checkpoint, step {one.step}: one run alone has {name}"
    for name, distance in list(one.tensors.items())[:_MOST]:
        apart = "?" if distance.max_abs is None else f"{distance.max_abs:.3g}"
        yield (
            f"first checkpoint, step {one.step}, {name}: {distance.differing:,} of {count(distance.count, 'element')} "
            f"differ, by {apart} at most"
        )
    for file, change in one.changes[:_MOST]:
        yield f"first checkpoint, step {one.step}, {file}: {change.name}: {change.a}, and {change.b} in the other run"
    for name in one.names[:_MOST]:
        yield f"first checkpoint, step {one.step}, {name}: in one run alone"
    more = sum(max(0, len(each) - _MOST) for each in (one.tensors, one.changes, one.names))
    if more:
        yield f"first checkpoint, step {one.step}: {more:,} more"
