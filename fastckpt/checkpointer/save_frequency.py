"""The frequency of saves: intervals that were given, or that all ranks measure and agree on."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from operator import length_hint
from typing import Any

import torch

from fastckpt._core.client.collective import Agreement, PeerDeparted, agreement, check_alike
from fastckpt._core.format.ids import SaveId
from fastckpt._core.in_process_saver import launch_of
from fastckpt._core.policy.frequency import profile_cache, profiling
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import RequestedIntervals
from fastckpt._core.policy.frequency.tuning import Terms
from fastckpt._core.schedule.decision_log import DecisionLog
from fastckpt._core.schedule.failure_history import FailureHistory
from fastckpt._core.schedule.profile_key import circumstances, size_of
from fastckpt._core.schedule.profiler import Due, Profiler
from fastckpt._core.schedule.schedule import AdaptiveSchedule, FixedSchedule, Schedule
from fastckpt._core.schedule.stopwatch import ProcessorTime, Stopwatch
from fastckpt._core.session import Session
from fastckpt.checkpointer.state import TrainingState

logger = logging.getLogger("fastckpt")

UNPROFILED = 10, 50
"""Steps between saves to memory, and to storage, of a job that a rank leaves before its intervals were chosen."""
_NUMBERS = itertools.count()


class SaveFrequency:
    """Decides when checkpoints of a training run are due; the measurements are part of each checkpoint.

    Args:
        session: Of the checkpointer.
        parts: The state of the run.
        every: The intervals that the user asks for.
        overhead: The part of training time that checkpoints may cost.
        model: The module that is trained, in no wrapper.
        optimizers: Those whose steps end an iteration.
        overlaps: Whether saves are copied in the background.

    Attributes:
        schedule: Decides; None while the run is not resumed.
        profile_key: The circumstances of a profile; None before the first `begin`.
    """

    def __init__(
        self,
        session: Session,
        parts: TrainingState,
        every: RequestedIntervals,
        overhead: float,
        *,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        overlaps: bool,
    ) -> None:
        self._session, self._parts, self._model, self._optimizers = session, parts, model, optimizers
        self._every, self._overhead, self._overlaps = every, overhead, overlaps
        self._name = f"frequency {next(_NUMBERS)}"
        self._ranks: Agreement | None = None
        self._decisions: DecisionLog
        self._written: tuple[profile_cache.Remembered | None, str] = (None, "")
        self._life = FailureHistory("", 0)
        self.schedule: Schedule | None = None
        self.profile_key: profile_cache.ProfileKey | None = None

    def begin(self, step: int, saved: Mapping[str, Any], options: Mapping[str, str], data: Any) -> None:
        """Choose the schedule after ``step``, the same on all ranks; raises ConfigError if their options differ.

        Args:
            step: The step that was resumed.
            saved: Result of `state` in the checkpoint that was resumed; empty for a new job.
            options: Other options that must be equal on all ranks.
            data: The loader, whose length bounds the profiling.
        """
        # 1. gather the options, sizes and lengths of all ranks   2. look for a profile of these circumstances
        # 3. agree on whether all have one   4. choose: intervals that were given, else measured ones
        place, adaptive = self._session.place, self._every.automatic
        self._decisions = DecisionLog(self._session.link, self._overhead if adaptive else None)
        length = profiling.length(length_hint(data, 0) or None)
        given = {"every": str(self._every), "overhead": str(self._overhead), **options, **self._parts.shared}
        ranks = self._ranks = agreement(place.world_size, self._name)
        # Failures as the first rank knows them: agents count their own restarts, and each node has its own memory.
        life = [launch_of(place), place.restart_count, saved.get("life", ())]
        gathered = ranks.gather([given, life, length, size_of(self._model)])
        all_given, (life, *_), lengths, sizes = zip(*gathered, strict=True)
        check_alike(all_given)
        self.profile_key = circumstances(
            self._model,
            self._optimizers,
            self._session.directory,
            size=max(sizes),
            world_size=place.world_size,
            overlaps=self._overlaps,
        )
        begun = profile_cache.from_numbers(saved.get("profile"), self.profile_key)
        known = self._remembered(step, saved.get("tempo", ""), begun) if adaptive else None
        knows, begins = zip(*ranks.gather([saved["tempo"] if known else "", begun and saved["profile"]]), strict=True)
        self._life = FailureHistory(*life)
        memory, storage = self._every.memory, self._every.storage
        if isinstance(memory, int) and isinstance(storage, int):
            self.schedule = FixedSchedule(memory, storage, step)
            return
        self.schedule = self._adaptive(
            ranks,
            step,
            known if _are_one(knows) else None,
            begun if _are_one(begins) else None,
            range(step + 1, step + 1 + min(lengths)),
        )

    def _adaptive(
        self,
        ranks: Agreement,
        step: int,
        known: profile_cache.Remembered | None,
        begun: Profile | None,
        turns: range,
    ) -> AdaptiveSchedule:
        terms = Terms(self._overhead, self._every, self._life.mean_time_between_failures)
        session = self._session
        processor = ProcessorTime(session.saver_pid, session.place.local_world_size)
        watch = Stopwatch(session.beats, session.glance, processor)
        profiler = Profiler(ranks, watch, terms, turns=turns, before=begun)
        return AdaptiveSchedule(ranks, terms, watch, profiler, known, step)

    def _remembered(self, step: int, cached: str, begun: Profile | None) -> profile_cache.Remembered | None:
        """The profile of an earlier run, if it applies to this one; else log why not."""
        assert self.profile_key is not None
        if not cached:
            why = f"profiling goes on: runs before this one measured {begun.iterations} iterations" if begun else ""
            self._decisions.profiling(step, why or "profiling: nothing is known of this training yet")
            return None
        known = profile_cache.from_json(cached, self.profile_key, self._overhead)
        if isinstance(known, profile_cache.Ignored):
            self._decisions.profiling(step, f"profiling again, without the profile that was saved: {known.reason}")
            return None
        return known

    def due(self, step: int) -> Due:
        """The saves that are due after this step; a rank that closed leaves the others the intervals chosen by then."""
        assert self.schedule is not None
        try:
            due = self.schedule.turn(step)
        except PeerDeparted as error:
            decision = self.schedule.decision
            memory, storage = (decision.intervals.memory, decision.intervals.storage) if decision else UNPROFILED
            logger.warning(
                "%s, and no longer agrees on how often to save: from step %d on every %d steps, to storage every %d",
                error,
                step,
                memory,
                storage,
            )
            self.schedule = FixedSchedule(memory, storage, step - 1)
            due = self.schedule.turn(step)
        self._decisions.report(self.schedule.decision)
        return due

    def saved(self, save: SaveId | None, *, persist: bool) -> None:
        """A snapshot was taken, and is to be persisted; None if it was skipped."""
        if self.schedule is not None:
            self.schedule.saved(save, persist=persist)

    def state(self) -> dict[str, Any]:
        """Measurements that a resumed job need not repeat."""
        schedule = self.schedule if isinstance(self.schedule, AdaptiveSchedule) else None
        progress = schedule.progress if schedule else None
        return {
            "tempo": self._measured(schedule.known) if schedule else "",
            "profile": profile_cache.to_numbers(progress, self.profile_key) if self._every.automatic else {},
            "life": self._life.state(),
        }

    def _measured(self, known: profile_cache.Remembered | None) -> str:
        """The profile as a text, made only after a decision: saves may be frequent."""
        if known is not None and known is not self._written[0] and self.profile_key is not None:
            self._written = known, profile_cache.to_json(known, self.profile_key, self._overhead)
        return self._written[1] if known is not None else ""

    def end(self) -> None:
        """End the measurements: another resume begins them again."""
        self.schedule = None

    def leave(self) -> None:
        """Let the other ranks agree without this one."""
        if self._ranks is not None:
            self._ranks.leave()


def _are_one(values: Sequence[Any]) -> bool:
    """Return whether all ranks have the same values.

    A rank that decides by another value would wait for the others in vain.
    """
    return all(value == values[0] for value in values)
