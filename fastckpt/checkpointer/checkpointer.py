"""Checkpoints in three lines of a training loop, as often as they are worth what they cost."""

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from operator import length_hint
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from fastckpt._core.arguments import directory, instance, public, shown, whole_step
from fastckpt._core.client.collective import Agreement, PeerDeparted, agreement, check_alike
from fastckpt._core.client.missing_close import MissingClose
from fastckpt._core.client.optimizers import kinds
from fastckpt._core.client.optimizers import unwrapped as stepping
from fastckpt._core.client.saver_options import RemoteTierOptions
from fastckpt._core.format.ids import SaveId
from fastckpt._core.in_process_saver import launch_of
from fastckpt._core.policy.frequency import profile_cache, profiling
from fastckpt._core.policy.frequency.intervals import checked_overhead
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import parse
from fastckpt._core.policy.frequency.tuning import Terms
from fastckpt._core.policy.retention import KeepAny, KeepLast, KeepMeasured
from fastckpt._core.resume.tiers import OTHER_KIND
from fastckpt._core.retention import EPOCH, CheckpointDeletionStrategy, PolicyStrategy
from fastckpt._core.schedule.decision_log import DecisionLog
from fastckpt._core.schedule.failure_history import FailureHistory
from fastckpt._core.schedule.micro_batches import MicroBatches
from fastckpt._core.schedule.profile_key import circumstances, size_of
from fastckpt._core.schedule.profiler import Due, Profiler
from fastckpt._core.schedule.schedule import AdaptiveSchedule, FixedSchedule, Schedule
from fastckpt._core.schedule.stopwatch import Stopwatch
from fastckpt._core.session import SaveResult, StorageType
from fastckpt._core.stateful import Stateful
from fastckpt.checkpointer.backends import framework_of
from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.state import OPTIMIZERS, OWN, Part, TrainingState, further, unwrapped
from fastckpt.errors import ConfigError, FastckptError, NoLoadableCheckpoint, StepError

logger = logging.getLogger("fastckpt")

RETRY = 0.2
"""Seconds until the last step tries again to find a place in memory that persists or other ranks hold."""
RANKS_PATIENCE = 60.0
"""Seconds that the last step waits for other ranks to fill or free such a place."""
UNPROFILED = 10, 50
"""Steps between saves to memory, and to storage, of a job whose ranks part before that was found out."""
_NUMBERS = itertools.count()
_NEWEST_AND_EPOCHS = KeepAny((KeepLast(2), KeepMeasured(EPOCH)))
"""What is kept on storage by default."""


class CheckpointerOptions(RemoteTierOptions, total=False):
    """What may be given to a `Checkpointer` beside the parts of the training."""

    every: Any
    overhead: float
    keep_epochs: bool
    deletion_strategy: CheckpointDeletionStrategy
    others: Mapping[str, Stateful]
    gradients: bool
    overlap: bool
    stage: int | str | None
    weights_only: bool
    verify: str


PARTS = ("optimizer", "scheduler", "data")
_OWN = (
    CheckpointerOptions.__annotations__.keys() - RemoteTierOptions.__annotations__.keys() - {"weights_only", "verify"}
)


class Checkpointer:
    """Saves and resumes a training: ``resume()`` before the loop, ``step(n)`` at the end of each of its steps.

    Snapshots are copied into shared memory behind the next forward and backward, and some are persisted: as often as
    that costs at most ``overhead`` of the training's time, as measured, in both directions. All ranks construct one.

    Args:
        checkpoint_dir: As for `DdpCheckpointer`.
        model: The module, sharded or not; of DistributedDataParallel that inside is saved. See docs/fsdp.md.
        optimizer: One, or several: their parameters and states change in their steps only.
        scheduler: One, or several.
        data: A `fastckpt.data.ResumableDataLoader` or `ResumableSampler`, or what else has a state; see docs/data.md.
        **options: ``every``: "auto", a number of steps, a timedelta, or ``{"memory": ..., "storage": ...}`` with one of
            these each. ``overhead``: the part of training time that checkpoints may cost, by default 0.035.
            ``keep_epochs``: whether the last step of each epoch of ``data`` is persisted and kept, by default True.
            ``deletion_strategy``: by default the newest 2 are kept on storage, and those at the ends of epochs.
            ``others``: more that has a state, equal on all ranks, by name, such as ``{"scaler": scaler}``.
            ``gradients``: whether ``.grad`` is saved, of each rank, for steps in the middle of gradient accumulation.
            ``overlap``: whether weights and states of the optimizers are copied in the background, by default True:
            then nothing but an optimizer's step may write to them between ``step()`` and that. Swap weights for
            averaged ones, and back, before ``step()``, or by ``parameter.data = average``. With False ``step()``
            copies all before it returns. See docs/saving.md.
            ``stage``: of which stage of a pipeline all that this rank gives is; see docs/fsdp.md.
            ``weights_only``, ``verify``, ``remote``, ``remote_deletion_strategy``: as for `DdpCheckpointer`.

    Raises:
        ConfigError: Something has no state, or a wish cannot be met.
        PlaceInUse: Another live job uses the directory, and goes on to.
    """

    @public
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        scheduler: Part = (),
        data: Any = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        directory(checkpoint_dir)
        instance("model", model, torch.nn.Module, "a torch.nn.Module", "give the module that is trained")
        self._every = parse(options.get("every", "auto"))
        self._overhead = checked_overhead(options.get("overhead", 0.035))
        self._keeps_epochs = options.get("keep_epochs", True)
        self._model = unwrapped(model)
        given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        self._optimizers = [stepping(each) for each in given if isinstance(each, torch.optim.Optimizer)]
        self._overlaps = _checked_overlap(options.get("overlap", True)) and bool(self._optimizers)
        staged, saved = options.get("stage") is not None, options.get("gradients", False)
        framework = framework_of(self._model, staged=staged)
        named: dict[str, Part] = {"model": self._model, "optimizer": optimizer, "scheduler": scheduler}
        named |= further(options.get("others", {}), {*named, "data", OWN})
        gradients = Gradients(self._model, self._optimizers, data, saved=saved)
        self._parts = TrainingState(
            framework.parts(named, gradients=saved, staged=staged), data, gradients, kinds(named)
        )
        self._data, self._batches = data, MicroBatches(self._optimizers, data, saved=saved)
        strategy = options.get("deletion_strategy") or PolicyStrategy(_NEWEST_AND_EPOCHS, os.fspath(checkpoint_dir))
        passed: dict[str, Any] = {name: value for name, value in options.items() if name not in _OWN}
        passed |= {"stage": options.get("stage")} if staged else {}
        self._checkpointer = framework(checkpoint_dir, strategy, overlap=self._optimizers, **passed)
        self._writer = self._checkpointer._writer
        if not self._overlaps:
            self._writer.overlap.defer(())
        self._agreed = f"frequency {next(_NUMBERS)}"
        self._tempo: Schedule | None = None
        self._ranks: Agreement | None = None
        self._told: tuple[profile_cache.Remembered | None, str] = (None, "")
        self._circumstances: profile_cache.ProfileKey | None = None
        self._life = FailureHistory("", 0)
        self._step = self._durable = 0
        self._repeats = False
        self._unclosed = MissingClose(self, self._writer.place.rank)

    @public
    def resume(self) -> int:
        """Load the newest checkpoint that all ranks can load into all parts; the step to go on after, 0 for a new job.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded.
            ConfigError: Parts are missing in it, or do not fit.
        """
        self._tempo = None
        try:
            loaded = self._checkpointer.resume(self._parts, self._own_part("", self._step))
        except NoLoadableCheckpoint as error:
            if OTHER_KIND in str(error):
                raise NoLoadableCheckpoint(f"{error} {self._checkpointer.FROM_OTHERS}") from error
            raise
        if self._writer.place.rank == 0 and (left := self._parts.left_out(loaded) - {OWN}):
            names = sorted(left)
            logger.warning(
                "the checkpoint has %s, which no part takes: it is not loaded. To load it, give %s",
                ", ".join(names),
                ", ".join(f"{name}=" if name in PARTS else f"others={{{name!r}: ...}}" for name in names),
            )
        known: Mapping[str, Any] = loaded.get(OWN, {})
        step = self._checkpointer.loaded_step if loaded else 0
        # Not if these words were taken from another checkpoint, by hand.
        self._step = self._durable = known.get("whole", step) if known.get("step") == step else step
        self._batches.begin(self._step)
        self._unclosed.begin(self._step)
        self._tempo = self._chosen_tempo(known)
        return self._step

    @public
    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> SaveResult | None:
        """Say that this step is done, after the optimizer's; save if a checkpoint is due.

        In the middle of an accumulation that the loader knows of, a checkpoint that is due waits for the update.

        Args:
            step: Counts on from what `resume` gave, through all epochs; equal on all ranks.
            metrics: What was measured of this state, for `KeepBestStrategy`.

        Returns:
            What became of the save; None if none was made.

        Raises:
            StepError: It is smaller than the one before.
            NotLoadable, ArenaTooSmall: As `DdpCheckpointer.save_checkpoint`.
        """
        if self._tempo is None:
            self._writer.be_ready()
            raise FastckptError(
                f"step {shown(step)} was given, but not resumed: call resume() before the first step, as it tells "
                "where to go on, and how often to save"
            )
        if (step := whole_step(step)) < self._step:
            raise StepError(f"step {step} comes after step {self._step}; count on from resume(), through all epochs")
        if step == self._step and metrics is None and not (self._repeats or self._writer.place.rank):
            self._repeats = True
            logger.warning("step %d was given again; give each step once, and count on from resume()", step)
        if step > self._step or metrics is None:  # else it is the same one, with what was measured of it
            self._batches.turn(step)
        self._step = self._unclosed.step = step
        due = self._due(step)
        self._decisions.report(self._tempo.decision)
        due, epoch = self._batches.due(due, self._ended_epoch())
        if not (due.snapshot or epoch):
            return None
        return self._save(persist=due.persist or bool(epoch), metrics={**(metrics or {}), **epoch})

    def _due(self, step: int) -> Due:
        """What is due after this step; a rank that closed leaves the others the intervals that were chosen by then."""
        assert self._tempo is not None
        try:
            return self._tempo.turn(step)
        except PeerDeparted as error:
            decision = self._tempo.decision
            memory, storage = (decision.intervals.memory, decision.intervals.storage) if decision else UNPROFILED
            logger.warning(
                "%s, and no longer agrees on how often to save: from step %d on every %d steps, to storage every %d",
                error,
                step,
                memory,
                storage,
            )
            self._tempo = FixedSchedule(memory, storage, step - 1)
            return self._tempo.turn(step)

    @public
    def close(self) -> None:
        """Save the last step, if it was not, and have it persisted; then end saving."""
        try:
            if self._durable < self._step:
                self._save_last()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self._end()

    def _end(self) -> None:
        self._unclosed.close()
        self._durable = self._step
        self._tempo = None
        try:
            if self._ranks is not None:
                self._ranks.leave()
        finally:
            self._checkpointer.close()

    def _save_last(self) -> None:
        """Save the last step. Persists that hold its place end by themselves; ranks that do, may wait for this one.

        So only the first rank of a node waits for ranks: no other waits for it.
        """
        start, patience = time.monotonic(), self._writer.settings.flush_timeout
        is_first, may_try_again = self._writer.place.local_rank == 0, True  # once more: it may be decided otherwise
        while True:
            self._writer.be_ready()
            status = self._writer.glance()
            if (result := self._save(persist=True, metrics={})).saved:
                return
            if status is None or not status.persists:
                patience = min(patience, RANKS_PATIENCE)
            waits = status is not None and bool(status.persists or (is_first and status.filling))
            if not (waits or may_try_again) or time.monotonic() > start + patience:
                level = logging.ERROR if is_first else logging.INFO  # what another rank lends goes into later saves
                logger.log(level, "the last step, %d, was not saved: %s", self._step, result.reason)
                return
            may_try_again = waits
            time.sleep(RETRY)

    def _save(self, *, persist: bool, metrics: Mapping[str, float]) -> SaveResult:
        step, position = self._batches.whole or (self._step, None)
        common, own = self._parts.state(position)
        state = common | self._own_part(self._found_out(), step)
        place = StorageType.DISK if persist else StorageType.MEMORY
        result = self._checkpointer.save_checkpoint(
            self._step, state, storage_type=place, rank_state=own, metrics=metrics
        )
        if result.saved:
            self._unclosed.saved = self._step
        save = SaveId(self._writer.link.history, self._step) if result.saved else None
        if self._tempo is not None:
            self._tempo.saved(save, persist=persist)
        if result.saved and persist and not self._overlaps:  # else it may be pending, in some rank
            self._durable = self._step
        return result

    def _found_out(self) -> str:
        """What a resumed job need not find out again; written anew only after a decision, for saves may be frequent."""
        known = self._tempo.known if isinstance(self._tempo, AdaptiveSchedule) else None
        if known is not None and known is not self._told[0] and self._circumstances is not None:
            self._told = known, profile_cache.to_json(known, self._circumstances, self._overhead)
        return self._told[1] if known is not None else ""

    def _own_part(self, tempo: str, step: int) -> dict[str, Any]:
        progress = self._tempo.progress if isinstance(self._tempo, AdaptiveSchedule) else None
        profile = profile_cache.to_numbers(progress, self._circumstances) if self._every.automatic else {}
        known = {"step": self._step, "whole": step, "tempo": tempo, "profile": profile, "life": self._life.state()}
        return {OWN: {**known, OPTIMIZERS: self._parts.optimizers}}

    def _ended_epoch(self) -> dict[str, float]:
        """The epoch that ends with this step, as a metric; empty if none does."""
        ends = self._keeps_epochs and getattr(self._data, "ended", False)
        return {EPOCH: float(self._data.epoch)} if ends else {}

    def _chosen_tempo(self, own: Mapping[str, Any]) -> Schedule:
        """The tempo of all ranks: what could differ between them is agreed upon."""
        memory, storage = self._every.memory, self._every.storage
        adaptive = self._every.automatic
        self._decisions = DecisionLog(self._writer.link, self._overhead if adaptive else None)
        place = self._writer.place
        length = profiling.length(length_hint(self._data, 0) or None)
        wishes = {"every": str(self._every), "overhead": str(self._overhead), "keep_epochs": str(self._keeps_epochs)}
        ranks = self._ranks = agreement(place.world_size, self._agreed)
        said = ranks.gather([wishes | self._parts.shared, launch_of(place), length, size_of(self._model)])
        wished, (launch, *_), lengths, bytes_of_ranks = zip(*said, strict=True)
        check_alike(wished)
        self._circumstances = now = circumstances(
            self._model,
            self._optimizers,
            self._writer.directory,
            size=max(bytes_of_ranks),
            world_size=place.world_size,
            overlaps=self._overlaps,
        )
        begun = profile_cache.from_numbers(own.get("profile"), now)
        known = self._remembered(own.get("tempo", ""), begun) if adaptive else None
        knows, begins = zip(*ranks.gather([known is not None, begun.iterations if begun else None]), strict=True)
        self._life = FailureHistory(launch, place.restart_count, own.get("life", ()))
        if isinstance(memory, int) and isinstance(storage, int):
            return FixedSchedule(memory, storage, self._step)
        terms = Terms(self._overhead, self._every, self._life.mean_time_between_failures)
        watch = Stopwatch(self._writer.beats, self._writer.glance)
        turns = range(self._step + 1, self._step + 1 + min(lengths))
        profiler = Profiler(
            ranks,
            watch,
            terms,
            turns=turns,
            before=begun if len(set(begins)) == 1 else None,
        )
        return AdaptiveSchedule(ranks, terms, watch, profiler, known if all(knows) else None, self._step)

    def _remembered(self, cached: str, begun: Profile | None) -> profile_cache.Remembered | None:
        """What an earlier run found out, if it is of use; else it is told why not."""
        assert self._circumstances is not None
        if not cached:
            why = f"profiling goes on: runs before this one measured {begun.iterations} iterations" if begun else ""
            self._decisions.profiling(self._step, why or "profiling: nothing is known of this training yet")
            return None
        known = profile_cache.from_json(cached, self._circumstances, self._overhead)
        if isinstance(known, profile_cache.Ignored):
            self._decisions.profiling(self._step, f"profiling anew, without the profile that was saved: {known.reason}")
            return None
        return known


def _checked_overlap(overlap: object) -> bool:
    if not isinstance(overlap, bool):
        raise ConfigError(f"overlap is {shown(overlap)}; give True or False: the optimizers are known")
    return overlap
