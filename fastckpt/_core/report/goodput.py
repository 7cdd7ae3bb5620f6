"""Goodput of a launch: each nanosecond of it, from its first event to its last, has one cause.

docs/reference/events.md defines the causes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fastckpt._core.report.launches import Launch, LaunchRound, Sample
from fastckpt._core.report.step_unit import StepUnit, stretch

USEFUL, STALL, REPEATED, INTERRUPTED = "useful", "stall", "repeated", "interrupted"
DETECTION, STOP, RENDEZVOUS, START, IMPORTS = "detection", "stop", "rendezvous", "start", "imports"
SETUP, RESUME, END, DOWN, UNEXPLAINED = "setup", "resume", "end", "down", "unexplained"
SPARE = "spare"
_OF_STEPS = (USEFUL, STALL, REPEATED, INTERRUPTED)
CAUSES = (*_OF_STEPS, DETECTION, STOP, RENDEZVOUS, SPARE, START, IMPORTS, SETUP, RESUME, END, DOWN, UNEXPLAINED)
TRAINING = frozenset({USEFUL, STALL, REPEATED})


@dataclass(frozen=True)
class Span:
    """A time of a launch (nanoseconds of its clock), divided among its causes without a rest."""

    begin: int
    end: int
    shares: Mapping[str, int]


@dataclass
class Steps:
    """Progress of a job over all its launches.

    Attributes:
        unit: In which steps are counted.
        furthest: Steps before the furthest point that was reached.
        new: Done for the first time.
        repeated: Done once more.
    """

    unit: StepUnit = field(default_factory=StepUnit)
    furthest: int = 0
    new: int = 0
    repeated: int = 0


@dataclass
class Spent:
    """The time of one launch.

    Attributes:
        spans: Without gaps, from its begin to its end.
        repeats: For each round, how many steps it had to do once more before it came to anything new.
    """

    spans: list[Span] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)

    def by_cause(self) -> dict[str, int]:
        """Nanoseconds of each cause."""
        return total(span.shares for span in self.spans)


def total(shares: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of shares, with all causes."""
    found = dict.fromkeys(CAUSES, 0)
    for share in shares:
        for cause, spent in share.items():
            found[cause] += spent
    return found


def unit_of(launches: Iterable[Launch]) -> StepUnit:
    """The unit of the steps of a job, by the stretches that one process did without a load."""
    return StepUnit.of(way for launch in launches for one in launch.rounds for way in _stretches(one.samples))


def _stretches(samples: Iterable[Sample]) -> Iterator[tuple[int, int]]:
    """Steps of the script, and as workers counted them, in the same time."""
    firsts = dict[int, Sample]()
    for sample in samples:
        first = firsts.setdefault(sample.loaded, sample)
        if 0 <= first.step < sample.step:
            yield sample.step - first.step, sample.named - first.named
        else:
            yield stretch(sample)


def spend(launch: Launch, steps: Steps) -> Spent:
    """Divide the time of a launch; ``steps`` is how far earlier ones came, and is brought up to date."""
    tape = _Tape(launch.begin, launch.end)
    spent = Spent(tape.spans)
    uses_us = any(one.joined for one in launch.rounds)
    for i, one in enumerate(launch.rounds):
        following = launch.rounds[i + 1].begin if i + 1 < len(launch.rounds) else launch.end
        halt = min(_halt(one, following), following)
        spent.repeats.append(_repeats(one, steps))
        tail = _tail(one)
        if _arrive(tape, one, halt, uses_us=uses_us):
            _train(tape, one, halt, steps)
            if tail == UNEXPLAINED and launch.outcome == "stopped" and one is launch.rounds[-1]:
                tail = END  # a signal ended the launch: its agent recorded the last step, and flushed
        tape.until(halt, tail)
        if one.stopped is not None:
            tape.until(one.stopped, STOP)
    tape.until(launch.end, END if launch.outcome else UNEXPLAINED)
    return spent


def settled(launch: Launch, spent: Spent) -> int:
    """The instant up to which the time that a launch has ``spent`` stays as it is, whatever its next events are.

    Later time has a cause that the end of a step, of a stage of a start, or of a round will decide.
    """
    one = launch.rounds[-1]
    if launch.outcome:
        return launch.end
    if one.stopped is not None:
        return one.stopped
    decided = one.begin
    for instant in (one.met, one.started, _last(one.imported, one), _last(one.joined, one), trains_from(one)):
        if instant is None:
            return decided
        decided = max(decided, instant)
    trained = [span.end for span in spent.spans[-1:-4:-1] if USEFUL in span.shares]
    return max(decided, *trained) if trained else decided


class _Tape:
    """Spans one after the other; an instant that is past already, or beyond the end, takes nothing from them."""

    def __init__(self, begin: int, end: int) -> None:
        self.now, self.spans = begin, list[Span]()
        self._end = end

    def until(self, instant: int, cause: str) -> None:
        """All the time until then has one cause."""
        instant = min(instant, self._end)
        if instant > self.now:
            self.spans.append(Span(self.now, instant, {cause: instant - self.now}))
            self.now = instant

    def train(self, instant: int, stalled: int, repeated: int, of: int) -> None:
        """Account for training until then: ``of`` steps were done, some of them repeated, with stalls by saves."""
        instant = min(instant, self._end)
        if instant > self.now:
            length = instant - self.now
            stall = max(0, min(stalled, length))
            again = (length - stall) * repeated // of
            shares = {USEFUL: length - stall - again, STALL: stall, REPEATED: again}
            self.spans.append(Span(self.now, instant, shares))
            self.now = instant


def _halt(one: LaunchRound, following: int) -> int:
    """The end of a round's training: its first failure, or its end."""
    ends = (one.failure.at if one.failure else None, one.stopped, one.finished)
    return min((at for at in ends if at is not None), default=following)


def _last(instants: Mapping[int, int], one: LaunchRound) -> int | None:
    """The last of the workers' instants; None if some worker has none."""
    return max(instants.values()) if instants and len(instants) >= len(one.pids) else None


def trains_from(one: LaunchRound) -> int | None:
    """The instant at which the last worker had its state, or without a load its checkpointer; None if one has none."""
    loaded = _last({rank: load.at for rank, load in one.loads.items()}, one)
    return loaded if one.loads or not any(sample.steps for sample in one.samples) else _last(one.joined, one)


def _arrive(tape: _Tape, one: LaunchRound, halt: int, *, uses_us: bool) -> bool:
    """The time until all workers train; whether they come to it before ``halt``."""
    ready = trains_from(one)
    loading = max((load.at - load.seconds for load in one.loads.values()), default=ready)
    phases = [
        *([(one.parked, RENDEZVOUS), (one.met, SPARE)] if one.parked else [(one.met, RENDEZVOUS)]),
        (one.started, START),
        (_last(one.imported, one), IMPORTS if uses_us else UNEXPLAINED),
        (_last(one.joined, one), SETUP),
        (loading, SETUP),
        (ready, RESUME if one.loads else SETUP),
    ]
    for instant, cause in phases:
        if instant is None or instant > halt:
            tape.until(halt, cause)
            return False
        tape.until(instant, cause)
    return True


def _base(one: LaunchRound) -> int:
    """The step from which its workers went on; 0 for a fresh start."""
    return max((load.step for load in one.loads.values() if load.step > 0), default=0)


def _repeats(one: LaunchRound, steps: Steps) -> int:
    has_begun = bool(one.loads) or trains_from(one) is not None
    return max(0, steps.furthest - steps.unit.before(_base(one))) if has_begun else 0


def _train(tape: _Tape, one: LaunchRound, halt: int, steps: Steps) -> None:
    """Spread the time between samples over the steps that were done; time after the last step is not ours."""
    ready, named = tape.now, _base(one)
    position, stalled = steps.unit.before(named), 0
    loaded = one.samples[0].loaded if one.samples else -1
    for sample in one.samples:
        if sample.at <= ready:
            continue  # its workers did not have their states yet
        reached = steps.unit.reached(sample)
        if sample.step < named and (reached < position or sample.loaded != loaded):
            position = reached  # back at an earlier checkpoint; else another rank was the furthest before
        named, loaded = sample.step, sample.loaded
        if reached <= position:
            continue
        again = max(0, min(steps.furthest, reached) - position)
        tape.train(min(sample.beat, halt), sample.stalled - stalled, again, reached - position)
        steps.new += reached - position - again
        steps.repeated += again
        steps.furthest = max(steps.furthest, reached)
        position, stalled = reached, sample.stalled


def _tail(one: LaunchRound) -> str:
    """The cause of the time from the last step on."""
    if one.finished is not None and one.failure is None:
        return END
    if one.stopped is None and one.failure is None:
        return UNEXPLAINED
    return INTERRUPTED if one.failure is not None and one.failure.kind == "died" else DETECTION
