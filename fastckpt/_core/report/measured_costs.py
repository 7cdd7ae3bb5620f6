"""Costs of a job's steps, saves, persists and restarts, and its failures, as its event logs have measured them."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from fastckpt._core.report import goodput
from fastckpt._core.report.events import is_time, whole
from fastckpt._core.report.frequency import DecidedIntervals
from fastckpt._core.report.report import Placed, Recovery, Report, incidents


@dataclass(frozen=True)
class MeasuredCosts:
    """Measurements of all launches in a report; None for values that were not seen.

    Attributes:
        step: Seconds of a step, outside of saves.
        steps: New steps that were measured.
        snapshot: Seconds that training waits for a save to memory.
        saves: Saves that were measured.
        persists: Bytes and seconds of each persist.
        restart: Seconds from a failure to the end of the first step, without that step.
        restarts: Restarts that were measured.
        start: Seconds from the begin of a launch until its workers train.
        failures: Failures, those together that struck several nodes at once.
        observed: Seconds that agents ran, of the node that was observed longest.
        decided: The intervals that the job chose last.
    """

    step: float | None
    steps: int
    snapshot: float | None
    saves: int
    persists: tuple[tuple[int, float], ...]
    restart: float | None
    restarts: int
    start: float | None
    failures: int
    observed: float
    decided: DecidedIntervals | None

    @property
    def persist_rate(self) -> float | None:
        """Bytes per second: the median of all persists."""
        rates = [size / seconds for size, seconds in self.persists if seconds > 0]
        return median(rates) if rates else None


def measured_costs(found: Report) -> MeasuredCosts:
    """The costs in a report."""
    nodes = len(found.nodes)
    done = found.steps.new + found.steps.repeated
    training = found.lost[goodput.USEFUL] + found.lost[goodput.REPEATED]
    step = training / done / nodes / 1e9 if done and training else None
    struck = [each for each in incidents(found.failures) if any(one.kind != "elsewhere" for one in each)]
    restarts = [seconds for each in struck if (seconds := _restart(each)) is not None]
    chains = list(found.nodes.values())
    persists = [tuple(each for placed in chain for each in _persists(placed)) for chain in chains]
    _, most = max(((len(each), each) for each in persists), default=(0, ()))
    decisions = [one for one in found.decisions if one.memory is not None and one.storage is not None]
    return MeasuredCosts(
        step=step,
        steps=done,
        snapshot=found.lost[goodput.STALL] / nodes / found.counts.saves / 1e9 if found.counts.saves else None,
        saves=found.counts.saves,
        persists=most,
        restart=max(0.0, median(restarts) - (step or 0.0)) if restarts else None,
        restarts=len(restarts),
        start=_start(chains),
        failures=len(struck),
        observed=max((sum(at.end - at.begin for at in chain) for chain in chains), default=0) / 1e9,
        decided=decisions[-1] if decisions else None,
    )


def _restart(struck: list[Recovery]) -> float | None:
    """Seconds of the slowest node of a failure; of an agent that died, since it was launched again."""
    first = [
        (one.first_step - (one.relaunched or 0) + one.silent) / 1e9 for one in struck if one.first_step is not None
    ]
    return max(first, default=None)


def _persists(placed: Placed) -> Iterator[tuple[int, float]]:
    for event in placed.launch.events:
        if event["event"] in ("persisted", "flush_done"):
            size, seconds = whole(event, "bytes", 0), event.get("seconds")
            if size > 0 and is_time(seconds) and seconds > 0:
                yield size, float(seconds)


def _start(chains: list[list[Placed]]) -> float | None:
    """Seconds of the first launch until its last worker trains."""
    rounds = [
        (chain[0].launch.begin, chain[0].launch.rounds[0]) for chain in chains if chain and chain[0].launch.rounds
    ]
    ends = [(goodput.trains_from(one), begin) for begin, one in rounds]
    return max(((end - begin) / 1e9 for end, begin in ends if end is not None), default=None)
