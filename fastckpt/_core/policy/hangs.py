"""Detection of hung ranks, and of the one to blame: pure functions of observations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

MANY = 20
"""Under "auto" a rank may be silent for so many times the slowest of the recent steps."""
FEW = 2
"""Times the slowest of these steps after which silence is reported: some jobs wait in each step."""
IDLE = 60.0
"""Seconds, at least, under "auto", after which it is reported that nobody does anything."""
LONG = 3600.0
"""Seconds, at least, under "auto", if somebody does something, or none of the ranks takes steps.

More than torch lets a rank wait in a collective by default: until then a healthy job may be silent.
"""
LAST = 86400.0
"""The same, if there is no restart left: the end of a healthy job could not be made good."""
PHASES = 10
"""Factor for the limits outside of steps, without "auto"."""
STARTS = 3
"""Factor for a start, to the longest start of this job before."""
EXIT = "exit"
"""The phase of a rank that ends, with its checkpointer open."""


@dataclass(frozen=True)
class Limits:
    """Limits on the seconds for which a rank may be silent.

    Attributes:
        step: Between two steps.
        phase: Before its first step, and in a phase for which the script gives no limit.
        idle: Between two steps, if no worker of the node does anything, not even compute.
        first: Before its first step, if that is longer than ``phase``.
        told: Seconds without activity until the hang is reported.
    """

    step: float
    phase: float
    idle: float = inf
    first: float = 0.0
    told: float = inf


@dataclass(frozen=True)
class Observation:
    """A rank as it is observed at a time.

    Attributes:
        rank: Its number.
        silent: Seconds since its last report.
        steps: Steps that it has completed since it was started.
        phase: Its phase; empty for taking steps.
        allowed: Seconds that its phase may last, if the script gives a limit; else 0.
        waited: Seconds of its silence in which others were `occupied`, for whom it may wait if it takes steps.
    """

    rank: int
    silent: float
    steps: int = 0
    phase: str = ""
    allowed: float = 0.0
    waited: float = 0.0

    @property
    def takes_steps(self) -> bool:
        """Return whether it has done its first step, and nothing else is known to occupy it."""
        return self.steps > 0 and not self.phase

    @property
    def own(self) -> float:
        """Seconds of its silence that are not another's."""
        return self.silent - self.waited if self.takes_steps else self.silent


@dataclass(frozen=True)
class Witness:
    """A rank as it is found when a hang is detected.

    Attributes:
        rank: Its number.
        steps: Steps that it has completed since it was started.
        state: Its state in the kernel: a letter as in /proc/PID/stat; empty if it has exited.
        goes_on: True if it has reported lately, much later than another.
        has_left: True if it has closed its checkpointer, or exited.
        waits: True if it waits in a collective for other ranks.
        place: Its place in the program, in words; empty if unknown.
        idle: Seconds for which it has neither computed, moved data nor waited for a disk.
    """

    rank: int
    steps: int = 0
    state: str = "S"
    goes_on: bool = False
    has_left: bool = False
    waits: bool = False
    place: str = ""
    idle: float = 0.0


def limits(
    setting: str,
    pace: float,
    alarms: int = 0,
    *,
    start: float = 0.0,
    patience: float = 0.0,
    sees_all: bool = True,
    may_restart: bool = True,
) -> Limits:
    """The limits that a setting means.

    Under "auto" ranks that wait may do so in good health: for a file, a person, another job. Their wait ends by
    itself at the process group's own limit, so their limit is half of that.

    Args:
        setting: "auto", "off" or a number of seconds.
        pace: Seconds of the slowest of the recent steps; 0 if none but first ones were seen.
        alarms: Hangs found in this job. Under "auto" each doubles the limits: it may have been in error.
        start: Seconds that the slowest start has taken, up to its first step.
        patience: Seconds that process groups let ranks wait in a collective; 0 if that is unknown.
        sees_all: True if all ranks of the job are in sight.
        may_restart: True if an error can be made good by a restart.
    """
    if setting == "off":
        return Limits(inf, inf)
    if setting != "auto":
        return Limits(float(setting), PHASES * float(setting), first=STARTS * start)
    longest, doubled = MANY * pace, 2.0**alarms
    # A slow job gets longer limits than the constants, never shorter ones.
    half = patience / 2
    told = max(IDLE, min(FEW * pace, half or inf))  # in any case before torch ends it
    busy = max(LONG if may_restart else LAST, longest, half) * doubled
    # Without a measured step nothing is known of the job's pace, so a short limit would be a guess.
    idle = max(told, longest, half if half and pace else LONG, 0.0 if may_restart else LONG) * doubled
    if not sees_all:  # idle workers here may wait for one of those that are not visible
        idle = told = inf
    return Limits(busy, busy, idle, STARTS * start, told)


def hung(sights: Sequence[Observation], limits: Limits, idle: float) -> list[int]:
    """The ranks that are silent for so long that the job cannot be well.

    One that is between two steps may wait for another that is not: as long as that one keeps to its own limit, both do.

    Args:
        sights: All ranks that have a checkpointer, or are to have one soon.
        limits: The limits of their silence.
        idle: Seconds since any rank reported or computed anything.
    """
    # Nobody computes and everybody is between steps: no rank can be the one that the others wait for in good health.
    if idle > limits.idle and all(sight.takes_steps or sight.phase == EXIT for sight in sights):
        return [sight.rank for sight in sights]
    # Ranks in a step may wait in a collective for one that evaluates or loads: its own limit decides for all.
    if occupied(sights, limits):
        return []
    return [sight.rank for sight in sights if _is_late(sight, limits)]


def occupied(sights: Sequence[Observation], limits: Limits) -> bool:
    """Return whether a rank that does not take steps keeps to its limit, so that others may wait for it."""
    return any(not (sight.takes_steps or _is_late(sight, limits)) for sight in sights)


def _is_late(sight: Observation, limits: Limits) -> bool:
    if sight.takes_steps:
        return sight.own > limits.step
    if sight.phase:
        return sight.own > (sight.allowed or limits.phase)
    return sight.own > max(limits.phase, limits.first)


def culprits(witnesses: Sequence[Witness], *, sees_all: bool) -> tuple[list[Witness], str]:
    """The ranks that hold the others up, and the evidence; all that do not go on, if it cannot be known.

    The state in the kernel counts first. Then ranks that are not in a collective where others wait; if all wait, those
    that are elsewhere than most; of several, those with fewer steps. Unless all ranks of the job are in sight, the
    culprit may be one that is not.
    """
    # The kernel's report is certain; places and counts of steps are circumstantial.
    for states, why in (("T", "is stopped (SIGSTOP)"), ("D", "waits in the kernel, uninterruptibly")):
        if found := [witness for witness in witnesses if witness.state and witness.state in states]:
            return found, why
    # One that has reported lately goes on and is not stuck; one that has left is blamed only if others wait.
    present = [witness for witness in witnesses if not (witness.has_left or witness.goes_on)]
    elsewhere = [witness for witness in present if not witness.waits]
    if not elsewhere:
        left = [witness for witness in witnesses if witness.has_left and not witness.waits]
        return _among_waiting(present, left, sees_all=sees_all)
    behind = _behind(elsewhere)
    if len(elsewhere) < len(present):
        return behind, "is not where the others wait for it"
    return behind, "has done fewer steps than the others" if len(behind) < len(present) else _together(present)


def _among_waiting(present: Sequence[Witness], left: list[Witness], *, sees_all: bool) -> tuple[list[Witness], str]:
    """The ranks that hold the others up, of those that wait for each other, or of those that have left."""
    if left:
        return left, "has ended, or is about to, while others wait for it"
    if others := _not_with_most(present):
        return others, "waits elsewhere than most others"
    behind = _behind(present)
    if len(behind) < len(present):
        return behind, "has done fewer steps than the others"
    return behind, _together(present) if sees_all else "waits, perhaps for a rank of another node"


def _together(present: Sequence[Witness]) -> str:
    return "hangs" if len(present) == 1 else "hang: which of them is to blame is not known"


def _behind(witnesses: Sequence[Witness]) -> list[Witness]:
    least = min([witness.steps for witness in witnesses], default=0)
    return [witness for witness in witnesses if witness.steps == least]


def _not_with_most(witnesses: Sequence[Witness]) -> list[Witness]:
    """Ranks that are not at the place where more than half are; none if there is no such place."""
    common = [place for place, count in Counter(each.place for each in witnesses).items() if 2 * count > len(witnesses)]
    return [each for each in witnesses if common and each.place not in common]
