"""Checkpoints in three lines of a training loop, as often as they are worth what they cost."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from operator import length_hint
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch.nn.parallel import DistributedDataParallel

from fastckpt.checkpointer import SaveResult, StorageType
from fastckpt.ddp import DdpCheckpointer
from fastckpt.engine.agreement import agreement
from fastckpt.engine.deletion import (
    EPOCH,
    CheckpointDeletionStrategy,
    KeepAnyStrategy,
    KeepEpochStrategy,
    KeepLatestStepStrategy,
)
from fastckpt.engine.parts import Part, Parts
from fastckpt.engine.stopwatch import Stopwatch
from fastckpt.engine.tempo import Adaptive, Profiler, Steady, Tempo
from fastckpt.engine.wishes import SecondLevel
from fastckpt.errors import FastckptError
from fastckpt.format.ids import SaveId
from fastckpt.policy import profile_cache, profiling
from fastckpt.policy.every import parse
from fastckpt.policy.failures import mean_time_between
from fastckpt.policy.frequency import checked_overhead
from fastckpt.policy.tuning import Terms
from fastckpt.stateful import Stateful
from fastckpt.storage.store import is_url

KEPT = 2
"""Checkpoints on storage, beside those at the ends of epochs."""


class Options(SecondLevel, total=False):
    """What may be given to a `Checkpointer` beside the parts of the training."""

    every: Any
    overhead: float
    keep_epochs: bool
    deletion_strategy: CheckpointDeletionStrategy
    others: Mapping[str, Stateful]
    weights_only: bool
    verify: str


_OWN = Options.__annotations__.keys() - SecondLevel.__annotations__.keys() - {"weights_only", "verify"}


class _Lifetime(NamedTuple):
    """How long a training was observed, in seconds, and how often it was resumed."""

    seconds: float
    failures: int


class Checkpointer:
    """Saves and resumes a training: ``resume()`` before the loop, ``step(n)`` at the end of each of its steps.

    Snapshots are copied into shared memory behind the next forward and backward, and some are persisted: as often as
    that costs at most ``overhead`` of the training's time, as measured, in both directions. All ranks construct one.

    Args:
        checkpoint_dir: As for `DdpCheckpointer`.
        model: The module; of DistributedDataParallel that inside is saved.
        optimizer: One, or several: their parameters and states change in their steps only.
        scheduler: One, or several.
        data: A `fastckpt.data.ResumableDataLoader` or `ResumableSampler`, or what else has a state; see docs/data.md.
        **options: ``every``: "auto", a number of steps, a timedelta, or ``{"memory": ..., "storage": ...}`` with one of
            these each. ``overhead``: the part of training time that checkpoints may cost, by default 0.035.
            ``keep_epochs``: whether the last step of each epoch of ``data`` is persisted and kept, by default True.
            ``deletion_strategy``: by default the newest 2 are kept on storage, and those at the ends of epochs.
            ``others``: more that has a state, equal on all ranks, by name, such as ``{"scaler": scaler}``.
            ``weights_only``, ``verify``, ``remote``, ``remote_deletion_strategy``: as for `DdpCheckpointer`.

    Raises:
        ConfigError: Something has no state, or a wish cannot be met.
        ArenaInUse: Another live job on this host uses the directory.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        scheduler: Part = (),
        data: Any = None,
        **options: Unpack[Options],
    ) -> None:
        self._every = parse(options.get("every", "auto"))
        self._overhead = checked_overhead(options.get("overhead", 0.035))
        self._keeps_epochs = options.get("keep_epochs", True)
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        named: dict[str, Part] = {"model": self._model, "optimizer": optimizer, "scheduler": scheduler}
        self._parts, self._data = Parts(named | dict(options.get("others", {})), data), data
        strategy = options.get("deletion_strategy") or _newest_and_epochs(checkpoint_dir)
        passed: dict[str, Any] = {name: value for name, value in options.items() if name not in _OWN}
        self._checkpointer = DdpCheckpointer(checkpoint_dir, strategy, overlap=self._optimizers, **passed)
        self._writer = self._checkpointer._writer
        self._watch = Stopwatch(self._writer.beats, self._writer.glance)
        self._tempo: Tempo | None = None
        self._told: tuple[profile_cache.Remembered | None, str] = (None, "")
        self._life, self._since = _Lifetime(0.0, 0), time.monotonic()
        self._step, self._saved = 0, -1

    def resume(self) -> int:
        """Load the newest checkpoint that all ranks can load into all parts; the step to go on after, 0 for a new job.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded.
            ConfigError: Parts are missing in it, or do not fit.
        """
        loaded = self._checkpointer.load_checkpoint()
        if loaded:
            self._parts.load(loaded, self._checkpointer.rank_state)
            seconds, failures = loaded["life"]
            self._life = _Lifetime(seconds, failures + (self._writer.place.restart_count > 0))
        else:
            first = self._optimizers[0] if len(self._optimizers) == 1 else None
            self._checkpointer.prepare(self._parts.state()[0] | self._own_part(0, ""), first)
        self._step = self._saved = loaded.get("step", 0)
        self._since = time.monotonic()
        self._tempo = self._chosen_tempo(loaded.get("tempo", ""))
        return self._step

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> SaveResult | None:
        """Say that this step is done, after the optimizer's; save if a checkpoint is due.

        Args:
            step: Counts on from what `resume` gave; equal on all ranks.
            metrics: What was measured of this state, for `KeepBestStrategy`.

        Returns:
            What became of the save; None if none was due.

        Raises:
            StepError, NotLoadable, ArenaTooSmall: As `DdpCheckpointer.save_checkpoint`.
        """
        if self._tempo is None:
            raise FastckptError("call resume() before the first step: it tells where to go on, and how often to save")
        self._step = step
        due = self._tempo.turn(step, self._watch.turn())
        epoch = self._ended_epoch()
        if not (due.snapshot or epoch):
            return None
        return self._save(persist=due.persist or bool(epoch), metrics={**(metrics or {}), **epoch})

    def close(self) -> None:
        """Save the last step, if it was not, and have it persisted; then end saving."""
        if self._tempo is not None and self._saved < self._step:
            self._save(persist=True, metrics={})
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self._end()

    def _end(self) -> None:
        self._watch.close()
        self._checkpointer.close()

    def _save(self, *, persist: bool, metrics: Mapping[str, float]) -> SaveResult:
        common, own = self._parts.state()
        state, place = (
            common | self._own_part(self._step, self._found_out()),
            StorageType.DISK if persist else StorageType.MEMORY,
        )
        result = self._checkpointer.save_checkpoint(
            self._step, state, storage_type=place, rank_state=own, metrics=metrics
        )
        save = SaveId(self._writer.link.history, self._step) if result.saved else None
        self._watch.saved(save, persist=persist)
        self._saved = self._step if result.saved else self._saved
        return result

    def _found_out(self) -> str:
        """What a resumed job need not find out again; written anew only after a decision, for saves may be frequent."""
        known = self._tempo.known if isinstance(self._tempo, Adaptive) else None
        if known is not None and known is not self._told[0]:
            self._told = known, profile_cache.to_json(known, self._circumstances, self._overhead)
        return self._told[1] if known is not None else ""

    def _own_part(self, step: int, tempo: str) -> dict[str, Any]:
        observed = self._life.seconds + time.monotonic() - self._since
        return {"step": step, "tempo": tempo, "life": [observed, self._life.failures]}

    def _ended_epoch(self) -> dict[str, float]:
        """The epoch that ends with this step, as a metric; empty if none does."""
        ends = self._keeps_epochs and getattr(self._data, "ended", False)
        return {EPOCH: float(self._data.epoch)} if ends else {}

    def _chosen_tempo(self, cached: str) -> Tempo:
        if isinstance(self._every.memory, int) and isinstance(self._every.storage, int):
            return Steady(self._every.memory, self._every.storage)
        ranks = agreement(self._writer.place.world_size)
        terms = Terms(self._overhead, self._every, mean_time_between(self._life.failures, self._life.seconds))
        known = profile_cache.from_json(cached, self._circumstances, self._overhead) if cached else None
        length = profiling.length(length_hint(self._data, 0) or None)
        steps = range(self._step + 1, self._step + 1 + length)
        profiler = Profiler(ranks, self._watch, steps, self._sizes, overlaps=bool(self._optimizers))
        return Adaptive(
            ranks, terms, self._watch, profiler, known if isinstance(known, profile_cache.Remembered) else None
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of the state; of device memory the peak and all there is."""
        common, _ = self._parts.state()
        size = sum(each.untyped_storage().nbytes() for each in _tensors(common))
        if not torch.cuda.is_available():
            return size, 0, 0
        return size, torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]

    @cached_property
    def _circumstances(self) -> profile_cache.Circumstances:
        directory = self._writer.directory
        tensors = [*self._model.parameters(), *self._model.buffers()]
        device = tensors[0].device.type if tensors else "cpu"
        return profile_cache.Circumstances(
            sum(each.numel() * each.element_size() for each in tensors),
            self._writer.place.world_size,
            directory.partition("://")[0] if is_url(directory) else "directory",
            torch.cuda.get_device_name() if device == "cuda" else device,
            {"fastckpt": version("fastckpt"), "torch": torch.__version__},
        )


def _newest_and_epochs(checkpoint_dir: str | os.PathLike[str]) -> CheckpointDeletionStrategy:
    directory = os.fspath(checkpoint_dir)
    return KeepAnyStrategy(KeepLatestStepStrategy(KEPT, directory), KeepEpochStrategy(directory))


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]
