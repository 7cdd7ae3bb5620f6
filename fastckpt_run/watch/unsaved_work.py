"""The work that a loss now would cost: the steps since the newest checkpoint of each tier."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.report.step_unit import StepUnit, stretch
from fastckpt._core.saver.stats import SaverStats


@dataclass(frozen=True)
class Unsaved:
    """The work done since one checkpoint.

    Attributes:
        save: That checkpoint; None if there is none, and all work would be lost.
        steps: Steps since then, as the report counts them.
        seconds: Seconds since the save of it began, without the time in which no worker of this launch ran.
        at_least: True if the seconds are those of this launch alone, and earlier ones had done a part of the steps.
    """

    save: SaveId | None
    steps: int
    seconds: float
    at_least: bool = False


@dataclass(frozen=True)
class UnsavedWork:
    """The cost of a loss now, for one checkpoint directory, as one node knows it.

    Attributes:
        directory: The checkpoint directory.
        worker: The work lost with a worker: since the newest checkpoint in any tier, memory first.
        node: The work lost with the node and its memory: since the newest one that is durable, or of which other nodes
            have all that this one has.
        storage: The work lost with the directory itself: since the newest one in the remote tier; None without one, or
            on nodes that do not upload.
    """

    directory: str
    worker: Unsaved
    node: Unsaved
    storage: Unsaved | None


def unsaved_work(
    stats: Iterable[SaverStats], telemetry: Mapping[str, Sequence[Telemetry]], now: float, since: float = 0.0
) -> list[UnsavedWork]:
    """The cost of a loss now for each checkpoint directory that workers have opened.

    - Before the first save everything since the workers loaded their state, or were started, is unsaved.
    - After a resume nothing is: the loaded state counts as a checkpoint of the tier that holds it. If a tier holds only
      an older one, the difference counts, too.
    - A save that was skipped is none.
    - Between a failure and the next load nothing is at risk: unsaved steps are lost already.
    - Directories are independent: a job that saves its model to two loses the steps that the one it resumes from lacks.

    Args:
        stats: `Saver.report`.
        telemetry: `Saver.telemetry`.
        now: The monotonic clock, in seconds.
        since: Start of the workers, by the same clock: telemetry that is older is of their predecessors.
    """
    return [_of_directory(each, telemetry.get(each.directory, ()), now, since) for each in stats]


def _of_directory(stats: SaverStats, ranks: Sequence[Telemetry], now: float, since: float) -> UnsavedWork:
    live = [rank for rank in ranks if rank.beat > since * 1e9]
    # The furthest: all are lost with it.
    furthest = max(live, key=lambda rank: (rank.steps, rank.step), default=None)
    position = _Position(stats, furthest, now, since)
    remote = stats.remote.newest if stats.remote else None
    durable = _newest(stats.durable, remote)
    return UnsavedWork(
        stats.directory,
        position.beyond(_newest(stats.memory, durable)),
        position.beyond(_newest(stats.replicas.newest, durable)),
        position.beyond(remote) if stats.remote else None,
    )


def _newest(*saves: SaveId | None) -> SaveId | None:
    return max((save for save in saves if save is not None), default=None)


class _Position:
    """Progress of the workers, in addition to the known saves."""

    def __init__(self, stats: SaverStats, rank: Telemetry | None, now: float, since: float) -> None:
        self._loaded, self._rank, self._now = stats.loaded, rank, now
        self._begun = dict(stats.begun)
        self._has_loaded = stats.loaded_at > since
        self._from = max(since, stats.loaded_at)
        self._unit = StepUnit.of([stretch(rank)] if rank else ())

    def beyond(self, save: SaveId | None) -> Unsaved:
        """The work since a checkpoint."""
        rank = self._rank
        if rank is None or not (self._has_loaded or rank.steps):
            return Unsaved(save, 0, 0.0)
        at = self._time_of(save)
        if at is not None and at >= self._from and save is not None:
            # Saved in this round. A save is whole in memory shortly before the workers name its step: below 0 then.
            ahead = self._unit.reached(rank) - self._unit.before(save.step)
            return Unsaved(save, max(0, ahead), max(0.0, self._now - at))
        done = self._unit.reached(rank) - self._unit.before(rank.loaded)
        before, seconds, at_least = self._before(save, at)
        return Unsaved(save, done + before, max(0.0, self._now - self._from) + seconds, at_least)

    def _before(self, save: SaveId | None, at: float | None) -> tuple[int, float, bool]:
        """Steps and seconds from a checkpoint to the workers' loaded state, and whether there was more."""
        rank, loaded = self._rank, self._loaded if self._has_loaded else None
        assert rank is not None
        if rank.loaded < 0 or (save is not None and save.step >= rank.loaded):
            return 0, 0.0, False  # nothing was loaded, or this, or one that was passed over for an older one
        steps = self._unit.before(rank.loaded) - self._unit.before(save.step if save else 0)
        reached = self._time_of(loaded)
        if at is None or reached is None:
            return steps, 0.0, True
        return steps, max(0.0, reached - at), False

    def _time_of(self, save: SaveId | None) -> float | None:
        """Return the time at which a save began, or the last known one before it did; None if there is none."""
        if save is None:
            return None
        if save in self._begun:
            return self._begun[save]
        known = [id for id in self._begun if id < save]
        # Only among others of its history: a launch does not know when those of earlier ones were made.
        return self._begun[max(known)] if known and max(known).history == save.history else None


def reached(rank: Telemetry) -> int | None:
    """The step that a worker has reached, as its script numbers them in saves; None before it has named one."""
    return StepUnit.of([stretch(rank)]).number(rank) if rank.step >= 0 else None
