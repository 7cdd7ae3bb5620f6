"""Checkpoints for FSDP, HSDP and tensor parallelism: each rank saves its shards, and loads its own parts of all."""

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.nn import Module

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.client.flash_options import FlashOptions
from fastckpt._core.client.save_results import at_least
from fastckpt._core.config import RankInfo
from fastckpt._core.error_codes import coded
from fastckpt._core.format.file_names import own_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import METADATA, TRAINING
from fastckpt._core.metrics import phase
from fastckpt._core.native.checkpoint_names import FOLDER, CheckpointNames
from fastckpt._core.replicas.own_entries import (
    COMPARED,
    UNLIKE,
    loaded_alone,
    of_another_world,
    shared_shards,
    with_own,
    without_alone,
)
from fastckpt._core.replicas.rank_differences import RankDifferences
from fastckpt._core.replicas.replica_faults import Lacking
from fastckpt._core.resume.load import RankState, load_copy
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.resume.tiers import Files
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, Session, SessionOptions, StorageType
from fastckpt._core.snapshot.rng_state import restore_rng, rng_state
from fastckpt._core.storage.store import normalised
from fastckpt.dcp.call_forms import by_name
from fastckpt.dcp.plan_messages import plan_mailbox
from fastckpt.dcp.reader import FoundCheckpoint, SharedMemoryReader
from fastckpt.dcp.shard_plans import PlannerDeparted, ShardPlans, Unplanned
from fastckpt.dcp.sharded_state import ShardedPart, as_before_on_error
from fastckpt.dcp.stage_names import StageNames, stages_in
from fastckpt.dcp.state_dicts import (
    MODEL,
    OPTIMIZER,
    Extra,
    Optimizers,
    WholeLoadPlanner,
    apart,
    optimizers_of,
    sharded_parts,
    state_of,
)
from fastckpt.dcp.stored_metadata import check_paths
from fastckpt.dcp.writer import step_of
from fastckpt.errors import BadCheckpoint, ConfigError, FastckptError
from fastckpt.fsdp.full import FsdpFullCheckpointer

__all__ = ["FsdpFullCheckpointer", "FsdpShardCheckpointer", "SaveResult", "StorageType"]

logger = logging.getLogger("fastckpt")

_NUMBERS = count()


class FsdpState(NamedTuple):
    """The state that one rank saves.

    Attributes:
        shards: State for DCP, with the values that it writes once for all ranks.
        common: Other state that ranks have in common, for a file of its own; may be empty.
        own: State of this rank alone.
    """

    shards: dict[str, Any]
    common: dict[str, Any]
    own: dict[str, Any]


class FsdpShardCheckpointer(BaseCheckpointer):
    """Saves the shards of all ranks to memory and storage, and loads them on any number of ranks.

    A checkpoint is a directory of DCP, which plain ``dcp.load`` reads. Every rank constructs one, and calls each method
    with the same steps. One rank writes each entry that is no DTensor or ShardedTensor.

    Args:
        checkpoint_dir: As for `DdpCheckpointer`; so are ``deletion_strategy``, ``verify``, ``overlap``, ``remote`` and
            ``remote_deletion_strategy``.
        weights_only: Require that all but shards, such as ``rank_state``, load with ``weights_only=True``.
        stage: Pipeline stage of this rank, a number or word, whose state it saves and loads. None: all ranks share one
            state.

    Raises:
        ConfigError: As for `DdpCheckpointer`, or ``stage`` is no name.
        PlaceInUse: As for `DdpCheckpointer`.
        FastckptError: Several ranks, but no process group yet.

    Attributes:
        rank_state: Loaded ``rank_state`` of this rank.
        last: Save that was begun last; None before.
    """

    _lacking: Lacking = "fine"

    @public
    def __init__(  # noqa: PLR0913  # the options of users, spelled out
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        weights_only: bool = True,
        verify: str = "resume",
        overlap: Optimizers | None = None,
        stage: int | str | None = None,
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
        replica_count: int = 0,
        comm_backend: str = "",
        save_timeout: int = 0,
        local_shard_num: int = 0,
        global_shard_num: int = 0,
    ) -> None:
        arguments.directory(checkpoint_dir)
        self._stage = StageNames(stage)
        place = RankInfo.from_environment()
        # Numbered: every rank constructs its checkpointers in the same order, so the n-th of all ranks share a mailbox.
        plans = plan_mailbox(place.world_size, f"plans {next(_NUMBERS)}")
        options = SessionOptions(
            weights_only=weights_only,
            verify=verify,
            overlap=overlap,
            remote=remote,
            remote_deletion_strategy=remote_deletion_strategy,
            flash=FlashOptions(replica_count, comm_backend, save_timeout, local_shard_num, global_shard_num),
        )
        self._writer = Session(checkpoint_dir, deletion_strategy, options)
        self._shards = ShardPlans(place, plans, self._writer.stall, weights_only=weights_only)
        self._differences = RankDifferences(self._writer, lacking=self._lacking)
        self._own = own_of(place.rank)
        self._reader = _Reader(self, self._own, self._stage)
        self.rank_state: dict[str, Any] = {}
        self.last: SaveId | None = None
        self._is_elsewhere = False

    @property
    def loaded_step(self) -> int:
        """Loaded step; -1 if none."""
        return self._reader.loaded_step

    @property
    def loaded_from(self) -> str:
        """Tier of the load, as of `DdpCheckpointer`."""
        return self._reader.loaded_from

    @public
    def save_checkpoint(  # noqa: PLR0913  # the options of users, spelled out
        self,
        step: int,
        *state: Any,
        state_dict: Mapping[str, Any] | None = None,
        model: Module | None = None,
        optimizer: Optimizers | None = None,
        extra_sd: Mapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
        storage_type: StorageType | None = None,
        rank_state: dict[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save the state of a step: a state dict, or a model with its optimizer. It may be changed after the call.

        ``save_checkpoint(step, state_dict, path, storage_type)``, or ``save_checkpoint(step, model, optimizer,
        extra_sd, path, storage_type)``; each also by name.

        All ranks plan the first save, and the next after a change of the state's structure or a grown Python value;
        saves to MEMORY with such a change are skipped. Other saves to MEMORY need no other rank; those to DISK do.
        Random generators are saved.

        Args:
            step: Step, not smaller than the last one saved.
            state_dict: Sharded state of this rank, as for ``dcp.save``.
            path: Directory in the checkpoint directory; default ``checkpoint-<step>``. Of paths elsewhere only the name
                counts, with a warning.
            storage_type: As for `DdpCheckpointer.save_checkpoint`; so is ``metrics``.
            model: Module, instead of a state dict.
            optimizer: Its optimizer, or several.
            extra_sd: More state of a model, by other names than "model" and "optimizer".
            rank_state: State of this rank alone.

        Raises:
            ConfigError: Not exactly one of state dict and model; an invalid path; or states that do not fit together.
            (StepError, NotLoadable, ArenaTooSmall): As `DdpCheckpointer.save_checkpoint`.
        """
        given = by_name(
            state,
            state_dict=state_dict,
            model=model,
            optimizer=optimizer,
            extra_sd=extra_sd,
            path=path,
            storage_type=storage_type,
        )
        arguments.saving(step, given.get("state_dict"), rank_state, metrics)
        file = arguments.path("path", given.get("path", ""))
        folder = self._folder(arguments.whole_step(step), file)
        whole = state_of(given)
        common = apart(given.get("extra_sd", {}))
        shards = {name: each for name, each in whole.items() if name not in common}
        parts = FsdpState(shards, common, dict(rank_state or {}))
        return self._save(step, parts, at_least(given.get("storage_type"), file), metrics, folder)

    def _folder(self, step: int, path: str) -> str:
        """The name of the directory of a checkpoint; empty for the default."""
        directory = self._writer.directory
        if not path or step_of(path, directory) == step:
            return ""
        parent, _, name = path.rstrip("/").rpartition("/")
        if parent and normalised(parent) != directory:
            if not self._is_elsewhere and self._writer.place.rank == 0:
                text = "a checkpoint of shards cannot lie at %s: those of this job are in %s, under checkpoint-<step>"
                logger.warning(text, path, directory)
            self._is_elsewhere = True
            return ""
        CheckpointNames(name).check(step)
        return name

    def _save(
        self,
        step: int,
        state: FsdpState,
        storage_type: StorageType | None,
        metrics: Mapping[str, float] | None,
        folder: str = "",
    ) -> SaveResult:
        writer = self._writer
        # 1. compare the ranks' common state   2. names of the stage   3. plan the shards, alone or with all ranks
        # 4. this rank's own state   5. the common state, in the first rank of each node   6. save
        writer.be_ready()
        writer.release()  # a load that failed
        save = writer.save_id(step)
        own: dict[str, Any] = {"state": state.own}
        # A stage's state is like no other's, but all ranks take part: one may have no stage by mistake.
        whole = {} if self._stage.name else state.shards | state.common
        persists = at_least(storage_type, metrics) is not StorageType.MEMORY
        self._differences.turn(step, lambda: whole, persists=persists, whole=state.common.keys)
        if self._differences.compared:
            own[COMPARED] = self._differences.compared
        if unlike := self._differences.own(whole):
            own[UNLIKE] = unlike
            state = state._replace(shards=shared_shards(state.shards, unlike, writer.place.rank))
        if self._stage.name:
            state = FsdpState(state.shards | self._stage.as_values(state.common), {}, state.own)
        try:
            with phase("snapshot.shards", step=step):
                # A save to storage may wait for all ranks, so a change of structure costs none of these.
                together = storage_type is not StorageType.MEMORY
                shards = self._stage.named(state.shards)
                files: dict[str, Any] = dict(self._shards.files(save, shards, together=together))
        except Unplanned as reason:
            return writer.skip(step, str(reason), is_final=isinstance(reason, PlannerDeparted))
        # After the plan: a save that is skipped need not read the generators.
        files[self._own] = {"rng": rng_state(), **own}
        if state.common and writer.place.local_rank == 0:
            files[TRAINING] = state.common
        self.last = save
        path = f"{folder}/" if "://" in writer.directory else f"{writer.directory}/{folder}/"
        return writer.save(
            step, files, storage_type, path if folder else "", metrics, {FOLDER: folder} if folder else {}
        )

    def get_storage_reader(self) -> StorageReader | None:
        """Choose and verify the newest checkpoint that all ranks can load; None if nothing was saved.

        All ranks call it, and then ``dcp.load(state, storage_reader=...)``, which also restores random generators.

        Raises:
            NoLoadableCheckpoint: As `DdpCheckpointer.load_checkpoint`.
        """
        return None if self._reader.find() is None else self._reader

    @public
    def load_checkpoint(
        self, model: Module, optimizer: Optimizers = (), resume_path: str | os.PathLike[str] = ""
    ) -> dict[str, Any]:
        """Load the newest checkpoint that all ranks can load into a model and its optimizers; all ranks call it.

        Args:
            model: Module, sharded in any way.
            optimizer: Its optimizer, or several; without, saved optimizer states are not read.
            resume_path: Checkpoint to load instead: a step, ``<checkpoint_dir>/checkpoint-<step>``, or another
                directory of DCP. Restarted workers: as for `DdpCheckpointer.load_checkpoint`.

        Returns:
            The saved ``extra_sd``, with whole tensors on the CPU. If nothing was saved: empty, and ``loaded_step`` is
                -1.

        Raises:
            ConfigError: The checkpoint lacks a part of the model, or has another shape.
            (NoLoadableCheckpoint, BadCheckpoint, FastckptError): As `DdpCheckpointer.load_checkpoint`.
        """
        if not self._find(resume_path):
            return {}
        # 1. load into places of their own   2. the model and its optimizers take these over   3. the generators last:
        # all that comes before may have drawn from them
        parts = sharded_parts(model, optimizers_of(optimizer))
        with as_before_on_error(parts):
            state, extra = self._load(parts)
            with self._writer.ranks.sharing_errors():
                for part in parts:
                    part.load_state_dict(state[part.name])
        self._reader.restore()
        return extra

    def _find(self, asked: str | os.PathLike[str]) -> bool:
        """Choose and verify the checkpoint to load, by default the newest; False if nothing was ever saved."""
        self._reader.reset(asked or None)
        if self.get_storage_reader() is not None:
            return True
        if asked:
            directory = self._writer.directory
            raise BadCheckpoint(f"{directory} holds no checkpoint {asked}: fastckpt ls {directory} shows what there is")
        self._writer.loads.nothing()
        return False

    def _load(self, parts: Sequence[ShardedPart]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load the found checkpoint; return the states of these parts, by name, and its other entries."""
        # 1. places to load into, sharded as the model is now   2. DCP reads into these
        with self._writer.ranks.sharing_errors():
            state = self._targets(parts)
        extra = Extra(self._reader.metadata, {MODEL, OPTIMIZER, *state})
        leaves = state | extra.leaves
        try:
            load(leaves, storage_reader=self._reader, planner=WholeLoadPlanner())
        except CheckpointException as error:
            # DCP wraps in it the errors of readers and planners on all ranks.
            ours = {rank: each for rank, (each, _) in error.failures.items() if isinstance(each, FastckptError)}
            # States of a rank's own shards fit no others.
            hint = of_another_world(self._reader.unlike, self._writer.place.world_size)
            if (own := ours.get(self._writer.place.rank)) is not None:
                raise (ConfigError(f"{own}. {hint}") if hint and isinstance(own, ConfigError) else own) from error
            for rank, each in ours.items():
                raise type(each)(f"rank {rank}: {each}") from error
            raise
        state.update((name, leaves[name]) for name in state)
        place = self._writer.place
        loaded = with_own(
            self._reader.common | extra.of(leaves) | state, self._reader.unlike, place.world_size, place.rank
        )
        self._differences.know(loaded, self._reader.unlike, self._reader.compared)
        return {name: loaded.pop(name) for name in state}, loaded

    def _targets(self, parts: Sequence[ShardedPart]) -> dict[str, Any]:
        """Places to load the states of parts into, without values that each rank has in a shape of its own."""
        alone = loaded_alone(self._reader.unlike, self._writer.place.world_size)
        return without_alone({part.name: part.target(self._reader.metadata) for part in parts}, alone)

    def close(self) -> None:
        """End saving, on all ranks."""
        self._differences.leave()
        try:
            super().close()  # first: the saver, when the other ranks ask it, knows who has closed
        finally:
            self._shards.close(self.last)


class _Reader(SharedMemoryReader):
    """Reads, in addition to DCP's shards, a rank's own state and the state common to all ranks."""

    _goes_on = True

    def __init__(self, checkpointer: FsdpShardCheckpointer, own: str, stage: StageNames) -> None:
        super().__init__(checkpointer)
        self._checkpointer = checkpointer
        self._name, self._stage = own, stage
        self._stages: set[str] = set()
        self._own: dict[str, Any] | None = None
        self.common: dict[str, Any] = {}
        self.metadata = Metadata({})

    def find(self) -> int | None:
        """Same as `SharedMemoryReader.find`; raises ConfigError unless the ranks have the stages that were saved."""
        step = super().find()
        self._checkpointer._differences.begin(self.loaded_step)
        if step is not None:
            given = self._writer.ranks.gather(self._stage.name)
            try:
                self._stage.check(self._stages, given)
            except ConfigError:
                self._let_go()
                raise
        return step

    @property
    def own_state(self) -> dict[str, Any]:
        """This rank's ``rank_state`` in the found checkpoint; empty if it was not there."""
        return self._own["state"] if self._own else {}

    @property
    def unlike(self) -> dict[str, Any]:
        """Entries of the found checkpoint that this rank had unlike others."""
        return self._own.get(UNLIKE, {}) if self._own else {}

    @property
    def compared(self) -> int:
        """The number of ranks that had compared their states, when it was saved."""
        return int(self._own.get(COMPARED, 0)) if self._own else 0

    def restore(self) -> None:
        """Put the random generators into the state in which they were saved, if this rank was there."""
        if self._own is not None:
            restore_rng(self._own["rng"])

    def _read(self, files: Files) -> FoundCheckpoint:
        found = super()._read(files)
        check_paths(found.metadata, files[METADATA])
        self._stages = stages_in(found.metadata.state_dict_metadata)
        found = found._replace(metadata=self._stage.own(found.metadata), copies=self._stage.own_places(found.copies))
        self.metadata = found.metadata
        names, threads = files.keys() & {self._name, TRAINING}, self._writer.threads
        beside = {name: load_copy(files[name], threads, weights_only=self._writer.weights_only) for name in names}
        self._own, self.common = beside.get(self._name), beside.get(TRAINING, {})
        return found

    def _took(self, found: ResumeResult) -> None:
        super()._took(found)
        rank, step = self._writer.place.rank, self.loaded_step
        self._checkpointer.rank_state = RankState(self.own_state, rank, step)
        if self._own is None:
            text = "rank %d has no state of its own in this checkpoint: its random state is not restored"
            logger.warning(coded(text, "FC-021"), rank)
        self.restore()
