"""Checkpoints in three lines of a training loop, as often as they are worth their cost."""

import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from fastckpt._core.arguments import directory, instance, public, shown, whole_step
from fastckpt._core.client.missing_close import MissingClose
from fastckpt._core.client.optimizers import kinds
from fastckpt._core.client.optimizers import unwrapped as stepping
from fastckpt._core.client.save_results import ABSENT
from fastckpt._core.policy.frequency.intervals import checked_overhead
from fastckpt._core.policy.frequency.requested import parse
from fastckpt._core.policy.retention import KeepAny, KeepLast, KeepMeasured, KeepNamed
from fastckpt._core.replicas.trained_state import unwrapped
from fastckpt._core.resume.tiers import OTHER_KIND
from fastckpt._core.retention import EPOCH, CheckpointDeletionStrategy, PolicyStrategy
from fastckpt._core.schedule.micro_batches import MicroBatches
from fastckpt._core.schedule.profiler import Due
from fastckpt._core.session import SaveResult, StorageType
from fastckpt._core.stateful import Stateful
from fastckpt.checkpointer.backends import backend_of
from fastckpt.checkpointer.gradients import Gradients
from fastckpt.checkpointer.save_frequency import SaveFrequency
from fastckpt.checkpointer.script_settings import SCRIPT, ScriptSettings
from fastckpt.checkpointer.state import OPTIMIZERS, OWN, PARAMETERS, Part, TrainingState, further
from fastckpt.errors import ConfigError, FastckptError, NoLoadableCheckpoint, StepError

logger = logging.getLogger("fastckpt")

RETRY = 0.2
"""Seconds until the last step tries again to find a place in memory that persists or other ranks hold."""
RANKS_PATIENCE = 60.0
"""Seconds that the last step waits for other ranks to fill or free such a place."""
AGREED = "agreed"
"""The metric of a checkpoint that names the newest step at which replicas were seen to be equal."""
_RETENTION = KeepAny((KeepLast(2), KeepMeasured(EPOCH), KeepNamed(1, AGREED)))
"""The default retention rule on storage."""
STEP_OF_RESUME = "resume(step=...) goes back to one that `fastckpt ls` shows on storage"
Often = str | int | timedelta
NOTHING: Mapping[str, Stateful] = MappingProxyType({})


class Checkpointer:
    """Saves and resumes a job: ``resume()`` before the loop, ``step(n)`` at the end of each step.

    Snapshots are copied to shared memory during the next forward and backward, and some are persisted. All ranks
    construct one.

    Args:
        checkpoint_dir: As for `DdpCheckpointer`.
        model: Module, sharded or not (docs/guides/fsdp.md). Of DistributedDataParallel the inner module is saved.
        optimizer: One or several.
        scheduler: One or several.
        data: ``fastckpt.data.ResumableDataLoader``, ``ResumableSampler``, or an object with a state
            (docs/guides/data.md).
        every: "auto", a number of steps, a timedelta, or ``{"memory": ..., "storage": ...}`` of these.
        overhead: Share of training time that checkpoints may cost.
        keep_epochs: Persist and keep the last step of each epoch of ``data``.
        deletion_strategy: Policy for older checkpoints; default: keep the newest 2 and ends of epochs.
        others: More objects with a state, such as ``{"scaler": scaler}``. State that differs per rank needs as many
            ranks (docs/guides/saving.md).
        gradients: Save ``.grad`` of each rank, for steps within gradient accumulation.
        overlap: Copy weights and optimizer states in the background: after ``step()`` only the next optimizer step may
            write to them (docs/guides/saving.md). False: ``step()`` copies all.
        stage: Pipeline stage of this rank (docs/guides/fsdp.md).
        weights_only: As for `DdpCheckpointer`; so are ``verify``, ``remote`` and ``remote_deletion_strategy``.

    Raises:
        ConfigError: An object has no state, or an option cannot be applied.
        PlaceInUse: Another live job uses the directory.
    """

    @public
    def __init__(  # noqa: PLR0913  # the options of users, spelled out
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        scheduler: Part = (),
        data: Any = None,
        every: Often | Mapping[str, Often] = "auto",
        overhead: float = 0.035,
        keep_epochs: bool = True,
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        others: Mapping[str, Stateful] = NOTHING,
        gradients: bool = False,
        overlap: bool = True,
        stage: int | str | None = None,
        weights_only: bool = True,
        verify: str = "resume",
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
    ) -> None:
        directory(checkpoint_dir)
        instance("model", model, torch.nn.Module, "a torch.nn.Module", "give the module that is trained")
        intervals, overhead, self._keeps_epochs = parse(every), checked_overhead(overhead), keep_epochs
        bare = unwrapped(model)
        given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        optimizers = [stepping(each) for each in given if isinstance(each, torch.optim.Optimizer)]
        self._overlaps = _checked_overlap(overlap) and bool(optimizers)
        staged: dict[str, Any] = {} if stage is None else {"stage": stage}
        backend = backend_of(bare, staged=bool(staged))
        named: dict[str, Part] = {"model": bare, "optimizer": optimizer, "scheduler": scheduler}
        named |= further(others, {*named, "data", OWN})
        self._parts = TrainingState(
            backend.parts(named, gradients=gradients, staged=bool(staged)),
            data,
            Gradients(bare, optimizers, data, saved=gradients),
            kinds(named),
        )
        self._script = ScriptSettings(named, data)
        self._data, self._batches = data, MicroBatches(optimizers, data, saved=gradients)
        self._checkpointer = backend(
            checkpoint_dir,
            deletion_strategy or PolicyStrategy(_RETENTION, os.fspath(checkpoint_dir)),
            overlap=optimizers,
            weights_only=weights_only,
            verify=verify,
            remote=remote,
            remote_deletion_strategy=remote_deletion_strategy,
            **staged,
        )
        self._writer = self._checkpointer._writer
        self._writer.count_steps(None)
        self._differences = self._checkpointer._differences
        self._differences.leave_buffers(model)
        self._differences.leave_out(OWN)
        if not self._overlaps:
            self._writer.overlap_with(())
        self._frequency = SaveFrequency(
            self._writer, self._parts, intervals, overhead, model=bare, optimizers=optimizers, overlaps=self._overlaps
        )
        self._step = self._durable = 0
        self._repeats = self._measures_alone = False
        self._unclosed = MissingClose(self, self._writer.place.rank)

    @public
    def resume(self, step: int | None = None, *, from_script: Collection[str] = (), skip: int = 0) -> int:
        """Load the newest checkpoint that all ranks can load; returns the step to continue after, 0 for a new job.

        Args:
            step: Step on storage to go back to, equal on all ranks (docs/guides/going_back.md). Restarted workers
                resume the newest save since then; a later launch goes back again.
            from_script: Settings to take from the script: options of optimizers ("lr"), arguments of schedulers
                ("T_max"), "seed" of the data (docs/guides/changed_script.md).
            skip: Batches of each rank to skip after ``step``; none after a later save.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded.
            BadCheckpoint: ``step`` does not exist, or cannot be loaded.
            ConfigError: Parts are missing or do not fit; unknown settings; data that cannot skip.
        """
        # 1. note the script's settings   2. load, or make memory ready   3. set the script's kept settings   4. name
        # unused entries   5. choose how often to save
        back_to = None if step is None else whole_step(step, STEP_OF_RESUME)
        self._script.note(from_script, skip, back_to)
        self._frequency.end()
        with _explained(self._checkpointer.FROM_OTHERS), self._writer.loads.applying(self._script.describe):
            loaded = self._checkpointer.resume(self._parts, self._own_part(self._step), back_to)
            known: Mapping[str, Any] = loaded.get(OWN, {})
            loaded_step = self._checkpointer.loaded_step if loaded else 0
            if loaded:
                self._script.apply(loaded_step, known.get(SCRIPT))
        if self._writer.place.rank == 0:
            self._parts.warn_of_left_out(loaded)
        # Not if these words were taken from another checkpoint, by hand.
        self._step = known.get("whole", loaded_step) if known.get("step") == loaded_step else loaded_step
        self._durable = self._step
        self._batches.begin(self._step)
        self._unclosed.begin(self._step)
        self._frequency.begin(self._step, known, {"keep_epochs": str(self._keeps_epochs)}, self._data)
        return self._step

    @public
    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> SaveResult | None:
        """Report a step as done, after the optimizer's step; save if a checkpoint is due.

        Within an accumulation that the loader knows, a due checkpoint waits for the update.

        Args:
            step: Continues from ``resume``, through all epochs; equal on all ranks.
            metrics: Numbers for ``KeepBestStrategy``: this step is saved and persisted. All ranks give some; those of
                the first rank count.

        Returns:
            The result of the save; None if there was none.

        Raises:
            StepError: The step is smaller than the last one.
            (NotLoadable, ArenaTooSmall): As `DdpCheckpointer.save_checkpoint`.
        """
        if self._frequency.schedule is None:
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
        if step > self._step or metrics is None:  # else it is the same one, with its metrics
            self._batches.turn(step)
        self._writer.reach(step)
        self._step = self._unclosed.step = step
        scheduled = self._frequency.due(step)  # also for a step with metrics: ranks may exchange measured times
        wanted = Due(True, True) if metrics and not self._measures_alone else scheduled
        due, epoch = self._batches.due(wanted, self._ended_epoch())
        if not (due.snapshot or epoch):
            if metrics and self._writer.place.rank == 0:
                logger.warning(
                    "step %d has metrics, and is in the middle of an accumulation, whose state is not saved: they are "
                    "not kept. Give them with a step that ends one",
                    step,
                )
            return None
        # Metrics may be given by one rank.
        self._differences.is_alone = not scheduled.snapshot
        self._differences.all_persist = scheduled.persist or bool(epoch) if metrics else None
        result = self._save(persist=due.persist or bool(epoch), metrics={**(metrics or {}), **epoch})
        if metrics and not scheduled.snapshot and result.reason.startswith(ABSENT):
            self._measures_alone = True  # else each such step would wait for the others as long
            logger.warning(
                "step %d was given metrics, but not on all ranks: it is not saved. Give them on all ranks. Until then "
                "steps with metrics are saved only when a checkpoint is due",
                step,
            )
        return result

    @public
    def close(self) -> None:
        """Save and persist the last step, unless it is durable, and end saving."""
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
        self._frequency.end()
        try:
            self._frequency.leave()
        finally:
            self._checkpointer.close()

    def _save_last(self) -> None:
        """Save the last step. Persists that hold its place end by themselves; ranks that do, may wait for this one.

        So only the first rank of a node waits for ranks: no other waits for it.
        """
        self._differences.is_alone, self._differences.all_persist = True, None
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
                level = logging.ERROR if is_first else logging.INFO  # another rank's lent state goes into later saves
                logger.log(level, "the last step, %d, was not saved: %s", self._step, result.reason)
                return
            may_try_again = waits
            time.sleep(RETRY)

    def _save(self, *, persist: bool, metrics: Mapping[str, float]) -> SaveResult:
        step, position = self._batches.whole or (self._step, None)
        common, own = self._parts.state(position)
        state = common | self._own_part(step)
        place = StorageType.DISK if persist else StorageType.MEMORY
        if persist and self._differences.agreed is not None:
            metrics = {**metrics, AGREED: float(self._differences.agreed)}
        result = self._checkpointer.save_checkpoint(
            self._step, state, storage_type=place, rank_state=own, metrics=metrics
        )
        if result.saved:
            self._unclosed.saved = self._step
        save = self._writer.save_id(self._step) if result.saved else None
        self._frequency.saved(save, persist=persist)
        if result.saved and persist and not self._overlaps:  # else it may be pending, in some rank
            self._durable = self._step
        return result

    def _own_part(self, step: int) -> dict[str, Any]:
        known = {"step": self._step, "whole": step, **self._frequency.state()}
        names = {OPTIMIZERS: self._parts.optimizers, PARAMETERS: self._parts.parameters.groups()}
        return {OWN: {**known, **names, SCRIPT: self._script.left}}

    def _ended_epoch(self) -> dict[str, float]:
        """The epoch that ends with this step, as a metric; empty if none does."""
        ends = self._keeps_epochs and getattr(self._data, "ended", False)
        return {EPOCH: float(self._data.epoch)} if ends else {}


def _checked_overlap(overlap: object) -> bool:
    if not isinstance(overlap, bool):
        raise ConfigError(f"overlap is {shown(overlap)}; give True or False: the optimizers are known")
    return overlap


@contextmanager
def _explained(remedy: str) -> Iterator[None]:
    """Add a remedy where there are only checkpoints of the other kind of model."""
    try:
        yield
    except NoLoadableCheckpoint as error:
        if OTHER_KIND in str(error):
            raise NoLoadableCheckpoint(f"{error} {remedy}") from error
        raise
