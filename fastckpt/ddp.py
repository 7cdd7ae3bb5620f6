"""Checkpoints for DistributedDataParallel: one model file, and a file for the state of each rank."""

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
    """Saves the state of a DDP job to memory and storage, and restores it after a failure.

    Every rank constructs one, and calls each method with the same steps. The first rank of each node copies the model;
    ``rank_state`` has the state that differs per rank.

    Args:
        checkpoint_dir: Directory that all nodes share: a path, or a URL for fsspec, such as ``s3://bucket/run1``.
        deletion_strategy: Policy for older checkpoints; None keeps all.
        weights_only: Require that files load with ``torch.load(weights_only=True)``, which runs no code from them.
        verify: "never" compares sizes. "resume" also compares digests before a rank loads. "always" also reads each
            checkpoint back from storage before it counts. Equal on all ranks.
        overlap: Optimizers whose parameters and ``state`` are copied during the next forward and backward. Their next
            step waits; nothing else may write to or resize these tensors until then (docs/guides/saving.md). None:
            ``save_checkpoint`` copies all.
        remote: Second tier, a URL or directory; ``checkpoint_dir`` then is a directory. The newest durable checkpoint
            is copied there in the background; the end of the job waits for it. Equal on all ranks.
        remote_deletion_strategy: Policy of fastckpt for older checkpoints there; None keeps all.
        replica_count: Without effect, for Flash Checkpoint; so are the options after it.

    Raises:
        ConfigError: Invalid ``verify``, ``remote`` or ``overlap``.
        PlaceInUse: Another live job uses the directory.

    Attributes:
        rank_state: Loaded ``rank_state`` of this rank.
        loaded_step: Loaded step; -1 if none.
        loaded_from: Tier: "memory", "peer" (another node's memory), "storage", "remote", "mixed" (memory lacked files),
            or "".
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
        """Reserve memory, and fault it in, in the background before the first save.

        Args:
            state_dict: State with the structure and sizes of later ones.
            optimizer: Optimizer with a still empty state, whose size is predicted for Adam, AdamW and SGD.

        Raises:
            ArenaTooSmall: Shared memory cannot hold two such checkpoints.
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
        """Save the state of a step. It may be changed after the call.

        With ``overlap``, only optimizer steps may change parameters and optimizer states. A step in memory is not
        copied again; DISK persists it. If every slot is in use, all ranks skip the save.

        Args:
            step: Step, not smaller than the last one saved.
            state_dict: State that all ranks share. Only the first rank of each node reads it.
            path: File of the persisted state; default ``<checkpoint_dir>/checkpoint-<step>/model.pt``. It may be a hard
                link: do not write into it. It appears when durable, and is deleted with the checkpoint. For a URL
                directory: URL or relative path of a copy.
            storage_type: MEMORY, or DISK to persist in the background. Default: DISK, but newer saves may replace it
                while it waits, unless there is ``path`` or ``metrics``.
            rank_state: State of this rank alone, without the data position. Random generators of torch are added.
            metrics: Numbers by name, for ``KeepBestStrategy``; those of the first rank count, without NaN and infinity.
                A second save of a step adds them, until it is persisted.

        Raises:
            StepError: The step is older than one saved since the last load.
            ConfigError: A metric is not a number.
            NotLoadable: The state does not load with ``weights_only=True``; names the key.
            ArenaTooSmall: Shared memory cannot hold two such checkpoints; only the first save raises it, later ones are
                skipped.
            OverlapError: With FASTCKPT_CHECK_OVERLAP=1: tensors changed during the copy.
        """
        arguments.saving(step, state_dict, rank_state, metrics, required=self._writes_model)
        self._forecast.end()
        file = arguments.path("path", path)
        place = at_least(storage_type, file) if file else storage_type
        states = self._compared(step, state_dict, rank_state, at_least(place, metrics))
        return self._writer.save(step, states, place, file, metrics)

    @public
    def load_checkpoint(self, resume_path: str | os.PathLike[str] = "") -> dict[str, Any]:
        """Load the newest checkpoint that all ranks can load, from memory if possible; all ranks call it.

        Tensors are on the CPU, and owned by the caller. Random generators are restored.

        Args:
            resume_path: File or checkpoint directory to load instead; later saves are newer than all before
                (docs/guides/going_back.md). Restarted workers may pass it again: they resume the newest save since
                then.

        Returns:
            The saved state; empty if nothing was saved.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but none can be loaded by all ranks, or all are of other libraries.
            BadCheckpoint: ``resume_path`` cannot be loaded.
            ConfigError: Ranks give different paths, or nodes do not share the directory.
            FastckptError: Another rank failed; names it and the reason.
        """
        # 1. agree on a new history   2. choose, verify, load and vote, until all ranks have the same checkpoint
        # 3. refuse a fresh start where other libraries have checkpoints   4. restore this rank's own state
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
            session.expect(self._loaded_sizes)  # its next saves are like the loaded checkpoint
        return self._apply(resumed, time.perf_counter() - start)

    def _compared(
        self, step: int, state_dict: dict[str, Any], rank_state: dict[str, Any] | None, place: StorageType | None
    ) -> dict[str, Any]:
        """The files of a save, with the entries that this rank has unlike others."""
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
        """End saving for this rank; its saves stay.

        A rank may close before others: their later saves include its last ``rank_state``. These end if it is the first
        rank of its node, or closes by an exception. Without fastckpt-run the last checkpoint is durable when rank 0
        exits.
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
        self._given = None  # arguments from before belong to another history
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
    """Bring DDP into the state of the middle of a run; call it at every start, before loading a state.

    DDP reduces its first backward in other buckets: with three ranks or more, sums after a restart are rounded
    differently. This discards one backward; parameters, buffers and random generators stay.

    Args:
        model: The DistributedDataParallel model.
        step_fn: Forward and backward of a batch of the usual shape, without an optimizer step.
    """
    rng = rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    step_fn()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
    restore_rng(rng)
