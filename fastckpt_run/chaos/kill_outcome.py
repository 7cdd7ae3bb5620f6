"""The outcome of one kill: its victims, the newest checkpoint before it, and the resumed one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastckpt._core.format.ids import SaveId
from fastckpt_run.chaos.resumed_bytes import DIFFERENT, UNKNOWN

RANK, AGENT, NODE = "rank", "agent", "node"
KINDS = (RANK, AGENT, NODE)


@dataclass
class KillOutcome:
    """One kill, and its outcome.

    Attributes:
        number: Number of the kill, from 1.
        kind: RANK, AGENT or NODE.
        rank: The rank that was killed; None if it was an agent.
        pids: The processes that got the signal.
        at: Time, in seconds since the epoch.
        step: The step that the job had reached, as its saves number them; None before it has saved.
        held: The newest checkpoint that counted then, in memory or durable; None if there was none.
        held_in: The tier that had it.
        seconds: From the kill to the first step that all ranks have taken since; None if none came.
        resumed: The checkpoint that was resumed; history -1 where no event log names it. None for none.
        tiers: Tiers in which the ranks found it.
        fresh: True if the workers began without a checkpoint.
        lost: Steps that were taken again.
        digests: EQUAL, DIFFERENT or UNKNOWN: the resumed bytes, compared with every record of them.
        digests_of: Files that were compared, or why none were.
        restarts_left: Restarts that the job still has; None if that is not known.
        trouble: Reason why nothing came back; empty if something did.
        stopped: True if it was not waited for to the end: the user has stopped the command.
    """

    number: int
    kind: str
    rank: int | None
    pids: list[int]
    at: float
    step: int | None = None
    held: SaveId | None = None
    held_in: str = ""
    seconds: float | None = None
    resumed: SaveId | None = None
    tiers: list[str] = field(default_factory=list)
    fresh: bool = False
    lost: int | None = None
    digests: str = UNKNOWN
    digests_of: str = ""
    restarts_left: int | None = None
    trouble: str = ""
    stopped: bool = False

    @property
    def fault(self) -> str:
        """Description of the failed recovery; empty if all came back, or if nobody waited for it."""
        if self.trouble or self.stopped:
            return self.trouble
        if self.resumed is None:
            return f"it began afresh, though {self._held()}" if self.held else ""
        if self.held and _is_older(self.resumed, self.held):
            return f"it resumed step {self.resumed.step}, though {self._held()}"
        return f"the bytes of what it resumed differ: {self.digests_of}" if self.digests == DIFFERENT else ""

    @property
    def came_back(self) -> bool:
        """True if the job went on from the newest checkpoint, with its bytes."""
        return self.seconds is not None and not self.fault

    def _held(self) -> str:
        return f"step {self.held.step if self.held else '?'} was whole in {self.held_in}"


def _is_older(resumed: SaveId, held: SaveId) -> bool:
    return resumed < held if resumed.history >= 0 else resumed.step < held.step


@dataclass(frozen=True)
class ChaosSummary:
    """All kills of a run of `fastckpt chaos`.

    Attributes:
        kills: Their outcomes.
        ended: Reason why there were no more, in words.
        job: End of the job; empty if it runs on.
        seconds: Duration of the run.
    """

    kills: Sequence[KillOutcome]
    ended: str
    job: str
    seconds: float

    @property
    def faults(self) -> list[str]:
        """Return the failed recoveries, by kill, and an end of the job that was no success."""
        found = [f"kill {kill.number}: {kill.fault}" for kill in self.kills if kill.fault]
        if self.job and self.job != "succeeded":
            found.append(f"the job has ended: {self.job}")
        elif self.job and not self.kills:
            found.append("the job had ended before the first kill: give a shorter --every")
        return found

    @property
    def tiers(self) -> Counter[str]:
        """Count the resumes that each tier, or combination of tiers, served."""
        return Counter(" and ".join(kill.tiers) for kill in self.kills if kill.tiers)
