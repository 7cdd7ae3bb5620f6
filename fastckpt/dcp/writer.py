"""Storage writer for DCP: each rank's part of a save goes into shared memory, and counts with ``.metadata``."""

import io
import logging
import os
import pickle
import re
import threading
import time
from typing import Any, NoReturn

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.format.distcp import ShardPlanner, whole
from fastckpt._core.format.file_names import shards_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.loadable import LoadableArchives
from fastckpt._core.format.manifest import METADATA
from fastckpt._core.replicas.rank_differences import RankDifferences
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, Session, SessionOptions, StorageType
from fastckpt._core.storage.store import normalised
from fastckpt._core.torch_private.sharding import StorageInfo
from fastckpt.dcp.stager import Staging
from fastckpt.errors import ConfigError, StepError

logger = logging.getLogger("fastckpt")

ROOM_DEADLINE = 600.0
"""Seconds that a save waits for storage to take the save before it, if memory has no room for both."""
_NAME = re.compile("(?:checkpoint|step)-([0-9]{1,19})")


class SharedMemoryWriter(BaseCheckpointer, StorageWriter):
    """Saves with ``dcp.save`` and ``dcp.async_save`` into shared memory; the agent persists in the background.

    Each rank gives its own to each save, with ``<checkpoint_dir>/checkpoint-<step>``, or the step, as
    ``checkpoint_id``. Saves raise NotLoadable for state that does not load with ``weights_only=True``, StepError, and
    ConfigError if ranks do not fit together.

    Args:
        checkpoint_dir: As for `DdpCheckpointer`; so are ``deletion_strategy``, ``verify``, ``remote`` and
            ``remote_deletion_strategy``.
        storage_type: DISK or MEMORY; as an attribute it may be changed between saves.
        weights_only: Require that all but tensors load with ``torch.load(weights_only=True)``; also for its readers.

    Raises:
        (ConfigError, PlaceInUse): As for `DdpCheckpointer`.

    Attributes:
        result: Result of the last save on this rank; None before.
        last: Save that was begun last; None before.
        staging: State that a `SharedMemoryStager` waited for last; None before.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        storage_type: StorageType = StorageType.DISK,
        weights_only: bool = True,
        verify: str = "resume",
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
    ) -> None:
        super().__init__()
        self.storage_type = storage_type
        self.result: SaveResult | None = None
        options = SessionOptions(
            weights_only=weights_only, verify=verify, remote=remote, remote_deletion_strategy=remote_deletion_strategy
        )
        self._writer = Session(checkpoint_dir, deletion_strategy, options)
        self._place = self._writer.place
        self._differences = RankDifferences(self._writer, keeps=False, lacking="fine")
        self._file = shards_of(self._place.rank)
        self._planner, self._loadable = ShardPlanner(), LoadableArchives()
        self._step: int | None = None
        self._named: SaveId | None = None
        self._saved = (-1, -1)
        self._turn = threading.Lock()
        self._thread = threading.current_thread()
        self.last: SaveId | None = None
        self.staging: Staging | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; ``dcp.save`` calls it with its ``checkpoint_id``. Raises ConfigError for one elsewhere."""
        if self.staging is not None:
            self.staging.begin()
            self.staging.join()
        if checkpoint_id is None:
            return
        with self._turn:
            self._reset(checkpoint_id)

    def _reset(self, checkpoint_id: str | os.PathLike[str]) -> None:
        self._thread = threading.current_thread()
        self._step = step_of(checkpoint_id, self._writer.directory)
        if self._step is None:
            raise ConfigError(
                f"checkpoint_id is {checkpoint_id!s}; this writer saves in {self._writer.directory}. Give "
                f"{self._writer.directory}/checkpoint-<step>, or the step alone."
            )
        if self._place.group_world_size > 1 and not self._writer.history.loads:
            self._writer.open_history(self._writer.ranks, "")  # the same on all nodes
        if self._named == SaveId(self._writer.link.history, self._step):
            # Some ranks may have their parts of the save that failed in memory, others not, and none may be mixed with
            # those of this one. All ranks name the step again, and so all turn to the same next history.
            self._writer.link.history += 1
        self._named = SaveId(self._writer.link.history, self._step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See that all ranks save, a step that is new; raises ConfigError, StepError."""
        rank = kwargs.get("rank", self._place.rank)
        if rank != self._place.rank or not kwargs.get("use_collectives", True):
            raise ConfigError(
                f"rank {self._place.rank} of the job saves as rank {rank}"
                f"{'' if kwargs.get('use_collectives', True) else ' without collectives'}; all ranks of the job save "
                "together: call dcp.save on each, without process_group, no_dist and use_collectives"
            )
        self._see_that_it_is_alone()
        if self._step is None:
            raise ConfigError(
                f"which step is saved? Give dcp.save(checkpoint_id=...): {self._writer.directory}/checkpoint-<step>, "
                "or the step alone"
            )
        if self._saved == (self._writer.history.loads, self._step):
            raise StepError(
                f"step {self._step} was saved before; give all of a step to one dcp.save, as one state_dict of several "
                "entries"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Wait until memory has room for this save, unless storage is in trouble; raises FastckptError if closed."""
        self._writer.be_ready()  # here: DCP raises one rank's error in all
        link, beats = self._writer.link, self._writer.beats
        link.release()  # of a load that failed
        slots, end = len(list(link.arena.glob("slot-*"))), time.monotonic() + ROOM_DEADLINE
        with beats.stall("save", ROOM_DEADLINE):
            # One slot is never written to: that of the newest checkpoint.
            # Polled: the saver sends a worker nothing but answers, and 5 ms are short compared with a persist.
            while (status := self._writer.glance()) and status.waiting > max(0, slots - 2) and not status.trouble:
                if time.monotonic() > end:
                    break
                time.sleep(0.005)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See that all ranks save; raises ConfigError."""
        if len(plans) != self._place.world_size:
            raise ConfigError(f"{len(plans)} ranks save; the job has {self._place.world_size}, and all must")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part into memory; then the state may be changed.

        Raises NotLoadable for values that would not load with ``weights_only=True``. Raises ConfigError, on all ranks,
        if they have unlike tensors by a name, of which one would be saved for all.
        """
        try:
            with self._turn:
                return self._write(plan, planner)
        finally:
            if self.staging is not None and self.staging.is_ours:
                self.staging.end()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._see_that_it_is_alone()
        if self.staging is not None and self.staging.is_ours:
            self.staging.settle()
        assert self._step is not None
        self.last = SaveId(self._writer.link.history, self._step)
        # Here: DCP raises one rank's error in all; a planner of another kind has no state to compare.
        persists = self.storage_type is not StorageType.MEMORY
        self._differences.turn(self._step, lambda: getattr(planner, "state_dict", {}), persists=persists)
        items = sorted(plan.items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
        resolved = [planner.resolve_data(item) for item in items]
        data = [each.getvalue() if isinstance(each, io.BytesIO) else each for each in resolved]
        if self._writer.weights_only:
            for item, each in zip(items, data, strict=True):
                if isinstance(each, bytes):
                    self._loadable.check(item.index.fqn, each)
        shard = self._planner.plan(data)
        states = {self._file: shard.plan}
        if self._place.rank == 0:
            # Without a commit: rank 0's part counts with `.metadata`, when all others have written theirs.
            lacking = self._writer.begin(self._step, states)
        else:
            # The first node's is persisted when it is whole, which it is with `.metadata`.
            alone = self._place.group_rank > 0
            lacking = self._save(states, self.storage_type if alone else StorageType.MEMORY)
        infos = [StorageInfo(self._file, *place) for place in shard.places]
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [WriteResult(MetadataIndex(self._file), 0, lacking)]
            if lacking
            else [WriteResult(item.index, info.length, info) for item, info in zip(items, infos, strict=True)]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write ``.metadata``, which the first rank alone does once all have written their parts."""
        with self._turn:
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # 1. where each item is, of all ranks   2. skip the save if a rank's part is missing   3. `.metadata`, whose
        # commit makes the checkpoint count
        self._see_that_it_is_alone()
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        assert self.last is not None
        step, lacking = self.last.step, {info for info in metadata.storage_data.values() if isinstance(info, str)}
        # A load has opened another history since: this save's parts are in the old one.
        if self.last.history != self._writer.link.history:
            lacking.add("a checkpoint was loaded meanwhile")
        if lacking:
            self.result = SaveResult(False, step, "; ".join(sorted(lacking)))
            logger.warning("step %d was not saved: %s", step, self.result.reason)
        elif not self._save({METADATA: whole(pickle.dumps(metadata))}, self.storage_type):
            self._saved = self._writer.history.loads, step

    def _see_that_it_is_alone(self) -> None:
        """Raise ConfigError if another save was begun since: this one's parts would pass for that one's."""
        if self._thread is not threading.current_thread():
            raise ConfigError(
                f"step {self._step} began to be saved before the save in {threading.current_thread().name} had ended: "
                f"wait for the future of dcp.async_save, or use a SharedMemoryStager, which does"
            )

    def _save(self, states: dict[str, Any], storage_type: StorageType) -> str:
        """Save a part, or the file that completes the save; return why it was not saved, empty if it was."""
        assert self._step is not None
        self.result = self._writer.save(self._step, states, storage_type, "")
        if not self.result:
            logger.warning("step %d was not saved: %s", self._step, self.result.reason)
        return "" if self.result else self.result.reason

    def storage_meta(self) -> StorageMeta:
        """The place of the checkpoint, as ``.metadata`` records it."""
        return StorageMeta(f"{self._writer.directory}/checkpoint-{self._step}")

    def close(self) -> None:
        """End saving when no part is being copied; an unfinished save fails."""
        with self._turn:
            self._differences.leave()
            super().close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return _NAME.fullmatch(os.path.basename(checkpoint_id)) is not None  # noqa: PTH119

    def wait(self, timeout: float = 1800) -> int | None:
        """Wait as ``wait_latest_checkpoint``."""
        return self._writer.wait(timeout)

    def __reduce__(self) -> NoReturn:
        if self.staging is not None:
            self.staging.end()
        raise TypeError(
            "a SharedMemoryWriter belongs to its process. Give dcp.async_save async_checkpointer_type=THREAD; dcp.save "
            "with it takes no longer than that stages."
        )


def step_of(checkpoint_id: str | os.PathLike[str], directory: str) -> int | None:
    """The step that a ``checkpoint_id`` names in a checkpoint directory: of ``<directory>/checkpoint-<step>``,
    ``checkpoint-<step>`` or ``<step>``, likewise of ``step-<step>``; None if it names none there.

    An existing ``<directory>/step-<step>`` is not ours: such an id names that, and no step.
    """
    text = str(checkpoint_id).rstrip("/")
    if text.isdecimal():
        return int(text)
    parent, _, name = text.rpartition("/")
    match = _NAME.fullmatch(name)
    if match is None or (parent and normalised(parent) != directory) or _is_foreign(directory, name):
        return None
    return int(match[1])


def _is_foreign(directory: str, name: str) -> bool:
    return name.startswith("step-") and os.path.lexists(f"{directory}/{name}")  # it may be a URL
