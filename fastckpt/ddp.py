"""Checkpoints for DistributedDataParallel: one model file per checkpoint, and a file for what differs per rank."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.client.flash_options import FlashOptions
from fastckpt._core.client.heartbeat import phase
from fastckpt._core.client.save_results import at_least
from fastckpt._core.error_codes import coded
from fastckpt._core.format.file_names import own_of
from fastckpt._core.format.manifest import MODEL
from fastckpt._core.replicas.own_entries import COMPARED, UNLIKE, with_own
from fastckpt._core.replicas.rank_differences import RankDifferences
from fastckpt._core.replicas.replica_faults import Lacking
from fastckpt._core.resume.candidates import RequiredFiles
from fastckpt._core.resume.directory_checks import refuse_foreign
from fastckpt._core.resume.load import RankState, load_copy
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.resume.tiers import Files
from fastckpt._core.retention import (
    CheckpointDeletionStrategy,
    KeepAnyStrategy,
    KeepBestStrategy,
    KeepEpochStrategy,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    KeepTimeIntervalStrategy,
)
from fastckpt._core.session import SaveResult, Session, SessionOptions, StorageType
from fastckpt._core.snapshot.optimizer_forecast import SizeForecast, with_optimizer_state
from fastckpt._core.snapshot.rng_state import restore_rng, rng_state

__all__ = [
    "CheckpointDeletionStrategy",
    "DdpCheckpointer",
    "KeepAnyStrategy",
    "KeepBestStrategy",
    "KeepEpochStrategy",
    "KeepLatestStepStrategy",
    "KeepStepIntervalStrategy",
    "KeepTimeIntervalStrategy",
    "SaveResult",
    "StorageType",
    "phase",
    "settle",
]

_STATE = "a dict, such as {'model': model.state_dict()}"

logger = logging.getLogger("fastckpt")


class DdpCheckpointer(BaseCheckpointer):
    """Saves a DDP job's state to memory and storage, and restores it after a failure.

    Every rank constructs one, and calls each method with the same steps. The state of the model is the same on all
    ranks: the first rank of each node copies it. What differs per rank goes into ``rank_state``.

    Args:
        checkpoint_dir: The checkpoint directory, shared by all nodes: a path, or a URL that fsspec opens, such as
            ``s3://bucket/run1``.
        deletion_strategy: Which older checkpoints to delete; None keeps all.
        weights_only: Whether files must load with ``torch.load(weights_only=True)``, which runs no code from them.
        verify: How much is compared with what was saved. "never": files must be there in their sizes. "resume":
            their digests, too, where there are some, before any rank loads one. "always": each checkpoint is also
            read back from storage before it counts there. All ranks give the same.
        overlap: The optimizer, or several, whose parameters and ``state`` may be copied during the next forward and
            backward; their next step waits for that. Until then nothing else may write to them, such as averages that
            are swapped in through ``.data``, and no storage be resized: see docs/guides/saving.md, "Swapping weights".
            None: all is copied before `save_checkpoint` returns.
        remote: A second tier: a URL, or another directory. What is durable in ``checkpoint_dir``, which is then a
            directory on a fast disk, is copied there in the background, one at a time, always the newest; those in
            between are not copied. The end of the job waits for the newest. All ranks give the same.
        remote_deletion_strategy: Which older checkpoints to delete there, one of those of fastckpt; None keeps all.
        replica_count: An option of Flash Checkpoint without effect here, likewise ``comm_backend``, ``save_timeout``,
            ``local_shard_num`` and ``global_shard_num``.

    Raises:
        ConfigError: ``verify`` is none of these; ``remote`` cannot be a second tier; ``overlap`` has something that is
            no torch optimizer.
        PlaceInUse: Another live job uses the directory, and has not released it in time.

    Attributes:
        rank_state: What this rank gave to `save_checkpoint` as ``rank_state``, as of the last `load_checkpoint`.
        loaded_step: The step that was loaded; -1 before that, or if there was none.
        loaded_from: Where this rank found it: "memory", "peer" (the memory of another node), "storage", "remote";
            "mixed" if memory had some of its files; "" if nothing was loaded.
    """

    _lacking: Lacking = "less"

    @public
    def __init__(  # noqa: PLR0913  # the options of users, spelled out
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        weights_only: bool = True,
        verify: str = "resume",
        overlap: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
        replica_count: int = 0,
        comm_backend: str = "",
        save_timeout: int = 0,
        local_shard_num: int = 0,
        global_shard_num: int = 0,
    ) -> None:
        options = SessionOptions(
            weights_only=weights_only,
            verify=verify,
            overlap=overlap,
            remote=remote,
            remote_deletion_strategy=remote_deletion_strategy,
            flash=FlashOptions(replica_count, comm_backend, save_timeout, local_shard_num, global_shard_num),
        )
        self._writer = Session(checkpoint_dir, deletion_strategy, options)
        self._weights_only = weights_only
        self.rank_state: dict[str, Any] = {}
        self.loaded_step = -1
        self.loaded_from = ""
        place = self._writer.place
        self._own = own_of(place.rank)
        self._writes_model = place.local_rank == 0
        self._given: dict[str, Any] | None = None
        self._differences = RankDifferences(self._writer, lacking=self._lacking)
        self._loaded_sizes: dict[str, int] = {}
        self._forecast = SizeForecast(MODEL, self._writer.expect_about)
        if not self._writes_model:
            self._forecast.end()

    @public
    def prepare(self, state_dict: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Have memory reserved and faulted in before the first save, in the background.

        Args:
            state_dict: A state like those to be saved; only its structure and sizes matter.
            optimizer: An optimizer whose state is part of ``state_dict`` but still empty: what it will hold after
                its first step is predicted for Adam, AdamW and SGD.

        Raises:
            ArenaTooSmall: Shared memory cannot hold two checkpoints of that size.
        """
        if self._writes_model:
            arguments.mapping("state_dict", state_dict, _STATE)
        if optimizer is not None:
            allowed = "a torch optimizer whose state is in state_dict"
            arguments.instance("optimizer", optimizer, torch.optim.Optimizer, allowed, "give it, or leave it out")
        self._writer.prepare(self._states(with_optimizer_state(state_dict, optimizer), None))

    @public
    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        path: str | os.PathLike[str] = "",
        storage_type: StorageType | None = None,
        rank_state: dict[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save the state of a step. Once this returns, the state may be changed.

        With ``overlap``, parameters and states of the optimizers may be changed by their steps only: these wait until
        the copy is done (``pending`` of the result). See docs/guides/saving.md.

        A step that memory already holds is not copied again: with DISK it is persisted. A save is skipped if every
        slot is in use, on all ranks alike; the result has the reason.

        Args:
            step: The step, not below the last one saved.
            state_dict: What all ranks have in common. Only the first rank of each node reads it.
            path: Where the file is once it is persisted, until the checkpoint is deleted; default
                ``<checkpoint_dir>/checkpoint-<step>/model.pt``. On the same file system it is a hard link to that file:
                replace it, but do not write into it. What was at ``path`` is replaced once the new file is durable. If
                the checkpoint directory is a URL: where a copy is stored, as such a URL or relative to that directory.
            storage_type: MEMORY, or DISK to have it persisted in the background as well. If left out, as
                DISK, but newer saves may overtake it while it waits for storage; with ``path`` or ``metrics``, exactly
                as DISK.
            rank_state: What differs on this rank; the position in the data does not, and belongs in ``state_dict``.
                The state of torch's random generators (CPU and accelerators) is added, and restored by
                `load_checkpoint`.
            metrics: Measurements of this state, for `KeepBestStrategy`: numbers by name; those of the first rank
                count. NaN and infinity count as not measured. Saving a step again that is in memory adds them, until it
                is persisted.

        Raises:
            StepError: The step is older than one saved since the last load.
            ConfigError: A metric is no number.
            NotLoadable: The state would save, but not load with ``weights_only=True``; names the key.
            ArenaTooSmall: Shared memory cannot hold two checkpoints of this size, and this is the first save. One that
                becomes too large later is skipped.
            OverlapError: With FASTCKPT_CHECK_OVERLAP=1: tensors were changed, unseen by torch, while the previous save
                was copying them.
        """
        arguments.saving(step, state_dict, rank_state, metrics, required=self._writes_model)
        self._forecast.end()
        file = arguments.path("path", path)
        place = at_least(storage_type, file) if file else storage_type
        states = self._compared(step, state_dict, rank_state, at_least(place, metrics))
        return self._writer.save(step, states, place, file, metrics)

    @public
    def load_checkpoint(self, resume_path: str | os.PathLike[str] = "") -> dict[str, Any]:
        """Load the newest checkpoint that all ranks can load, from memory if it is there; all ranks call it.

        The tensors are the caller's own, on the CPU; random generators are as they were when it was saved.

        Args:
            resume_path: A file or checkpoint directory to load instead of the newest one. A new history begins: what
                is saved from now on is newer than all before. Workers that are restarted in the same launch may
                pass the same path again: their first load resumes the newest save made since then, if there is one.

        Returns:
            The saved state; empty if nothing was ever saved.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but each is damaged, missing or quarantined for some rank; or
                there are only those of other libraries.
            BadCheckpoint: The one at ``resume_path`` cannot be loaded.
            ConfigError: Ranks give different paths, or nodes do not share the checkpoint directory.
            FastckptError: Another rank has failed: names it, and the reason.
        """
        # 1. agree on a new history   2. choose, verify, load and vote, until all ranks have the same checkpoint
        # 3. refuse a fresh start where other libraries have checkpoints   4. restore what this rank has of its own
        with self._writer.ranks.sharing_errors():
            return self._resume(arguments.path("resume_path", resume_path))

    def _resume(self, asked: str) -> dict[str, Any]:
        start, session = time.perf_counter(), self._writer
        ours = {MODEL, self._own} if self._writes_model else {self._own}
        ranks, finder, resume, since = session.open_resume(
            RequiredFiles(MODEL, self._own, from_peers=True, allow_lost=session.settings.allow_lost_rank_state),
            lambda files, *_: [*(ours & files.keys())],
            asked,
        )
        with session.work("resume"), closing(finder):
            resumed = resume.run_path(asked, self._load, ranks, since) if asked else resume.run(self._load, ranks)
        if resumed.state is None:
            refuse_foreign(session.directory, ranks)
        elif resumed.tier != "memory" and not asked:
            session.expect(self._loaded_sizes)  # what it goes on to save is like what it has loaded
        return self._apply(resumed, time.perf_counter() - start)

    def _compared(
        self, step: int, state_dict: dict[str, Any], rank_state: dict[str, Any] | None, place: StorageType | None
    ) -> dict[str, Any]:
        """The files of a save, with what this rank has unlike others."""
        self._writer.be_ready()
        self._differences.turn(step, lambda: state_dict, persists=place is not StorageType.MEMORY)
        return self._states(state_dict, rank_state)

    def _states(self, state_dict: dict[str, Any], rank_state: dict[str, Any] | None) -> dict[str, Any]:
        state: dict[str, Any] = {"rng": rng_state(), "state": dict(rank_state or {})}
        if self._differences.compared:
            state[COMPARED] = self._differences.compared
        if unlike := self._differences.own(state_dict):
            state[UNLIKE] = unlike
        own = {self._own: state}
        self._given = own
        return {MODEL: state_dict, **own} if self._writes_model else own

    @public
    def close(self) -> None:
        """End saving, for this rank: all that it has saved stays.

        A rank may close before the others, as with uneven data. What differs on it, as of its last save, then goes
        into their later saves as well, unless it is the first rank of its node, whose model these need, or closes as
        an exception ends it: then there are no later ones, and the results of the others say so.

        Without fastckpt-run the last checkpoint in memory is durable at the latest when rank 0 exits.
        """
        self._forecast.end()
        self._differences.leave()
        if self._writes_model:
            self._writer.close()
            return
        self._writer.close(self._given or {self._own: {"rng": rng_state(), "state": dict(self.rank_state)}})

    def _load(self, files: Files) -> tuple[dict[str, Any], dict[str, Any] | None]:
        ours = [MODEL, self._own] if self._writes_model else [self._own]
        self._loaded_sizes = {name: files[name].stat().st_size for name in ours if name in files}

        def read(path: Path) -> Any:
            return load_copy(path, self._writer.threads, weights_only=self._weights_only)

        return read(files[MODEL]), read(files[self._own]) if self._own in files else None

    def _apply(self, resumed: ResumeResult, seconds: float) -> dict[str, Any]:
        self._writer.resumed(resumed, seconds)
        self._differences.begin(resumed.id.step if resumed.id else -1)
        if resumed.state is None:
            return {}
        state, own = resumed.state
        self._given = None  # what was given before belongs to another history
        step, rank = (resumed.id.step if resumed.id else -1), self._writer.place.rank
        self.loaded_step, self.loaded_from = step, resumed.tier
        self.rank_state = RankState(own["state"] if own else {}, rank, step)
        if own is None:
            text = "rank %d has no state of its own in this checkpoint: its random state is not restored"
            logger.warning(coded(text, "FC-021"), rank)
        else:
            restore_rng(own["rng"])
        threads = resumed.details.get("num_threads")
        if threads not in (None, torch.get_num_threads()):
            logger.warning(
                "the checkpoint was saved with %s threads per operator, and this job has %d: sums may be rounded "
                "differently. Set OMP_NUM_THREADS=%s for identical results.",
                threads,
                torch.get_num_threads(),
                threads,
            )
        unlike = own.get(UNLIKE, {}) if own else {}
        whole = with_own(state, unlike, self._writer.place.world_size, rank)
        self._differences.know(whole, unlike, own.get(COMPARED, 0) if own else 0)
        return whole


def settle(model: torch.nn.Module, step_fn: Callable[[], object]) -> None:
    """Bring DDP into the state that it has in the middle of a run; call it at every start, before loading a state.

    DDP reduces its first backward in buckets of one order, and all later ones in the order in which gradients came.
    With three ranks or more, the first step after a restart then rounds sums differently from a run that was never
    interrupted. This makes that first backward a discarded one: parameters, buffers and random generators are left as
    they were, and no gradients remain.

    Args:
        model: The DistributedDataParallel model.
        step_fn: One forward and backward with a batch of the usual shape; no optimizer step.
    """
    rng = rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    step_fn()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
    restore_rng(rng)
