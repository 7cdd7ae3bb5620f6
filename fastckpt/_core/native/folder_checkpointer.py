"""Checkpoints that a framework lays out: files by their names to save, and a directory to load from."""

import logging
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from fastckpt._core import arguments
from fastckpt._core.arguments import public
from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.format.manifest import LATEST, OF_EACH_NODE
from fastckpt._core.format.manifest import NAME as MANIFEST
from fastckpt._core.format.raw import Raw
from fastckpt._core.format.safetensors import Tensors
from fastckpt._core.native.checkpoint_names import BY_STEP, FOLDER, CheckpointNames, called
from fastckpt._core.native.view import hold, make_view, remove_view
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.replicas.rank_differences import RankDifferences
from fastckpt._core.replicas.trained_state import trained_state
from fastckpt._core.resume.candidates import CandidateFinder, RequiredFiles
from fastckpt._core.resume.resume import ResumeResult
from fastckpt._core.resume.survey import join_on_storage
from fastckpt._core.resume.tiers import Candidate, Files
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, Session, SessionOptions, StorageType, is_failing
from fastckpt._core.snapshot.file_plans import check_names
from fastckpt._core.stateful import Stateful
from fastckpt._core.storage.store import normalised
from fastckpt.errors import BadCheckpoint, FastckptError

__all__ = [
    "CheckpointNames",
    "FolderCheckpointer",
    "NativeFolder",
    "Raw",
    "RequiredFiles",
    "SaveResult",
    "StorageType",
    "Tensors",
]

logger = logging.getLogger("fastckpt")

ANY_FILES = SessionOptions(weights_only=False)


class NativeFolder:
    """A checkpoint that all ranks have chosen and verified, as a directory to load from; open until it is closed.

    Copy the contents before it is closed: then other saves may reuse the files.

    Attributes:
        path: The directory; its name is that of the checkpoint's.
        step: Its step; -1 if something else wrote it.
        tier: The tier that had it: "memory", "storage", "remote", "mixed".
        details: The details saved with it.
    """

    def __init__(self, writer: Session, offers: CandidateFinder, resumed: ResumeResult, asked: str, name: str) -> None:
        self.step = resumed.id.step if resumed.id else -1
        self.tier, self.details = resumed.tier, resumed.details
        self._writer, self._offers, self._resumed = writer, offers, resumed
        self._since = time.perf_counter()
        self._is_open = True
        files: Files = resumed.state
        hold(writer.link, files.values(), resumed.id)
        name = name or called(self.details, self.step)
        self.path = make_view(writer.link, name, files) if resumed.id else Path(asked)

    def close(self, *, loaded: bool = True) -> None:
        """Release the files. All ranks do, when they have ``loaded`` them or have failed; again does nothing.

        A rank that has failed waits for no other; those that have loaded raise PeerFailed then, once all is released.
        """
        if not self._is_open:
            return
        self._is_open = False
        writer = self._writer
        ranks = writer.ranks
        try:
            if loaded:
                ranks.gather(None)  # files that others read are not to be removed
            else:
                ranks.fail(sys.exception() or FastckptError("the checkpoint was closed before it was loaded"))
        finally:
            remove_view(writer.link)
            writer.release()
            self._offers.close()
        if loaded:
            writer.resumed(self._resumed, time.perf_counter() - self._since)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(loaded=kind is None)


class FolderCheckpointer(BaseCheckpointer):
    """Saves files that a framework lays out, and finds the newest checkpoint that all ranks can load.

    Every rank constructs one, and calls each method with the same steps.

    Args:
        checkpoint_dir: The checkpoint directory, shared by all nodes: a path, or a URL that fsspec opens.
        needs: Files that make a checkpoint one of this framework, and whole for this rank.
        deletion_strategy: Strategy to delete older checkpoints; None keeps all.
        options: As for `DdpCheckpointer`; files of torch.save need not load with ``weights_only=True``.

    Raises:
        ConfigError, PlaceInUse: As for `DdpCheckpointer`.
    """

    @public
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        needs: RequiredFiles,
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        options: SessionOptions = ANY_FILES,
    ) -> None:
        self._writer = Session(checkpoint_dir, deletion_strategy, options)
        self._differences = RankDifferences(self._writer, keeps=False)
        self._needs = needs
        self._folder: NativeFolder | None = None
        self._checked: frozenset[str] = frozenset()
        self._has_compared = False

    @property
    def session(self) -> Session:
        """The session that it saves with."""
        return self._writer

    @property
    def writes_common(self) -> bool:
        """Return whether this rank saves the common files: the first rank of each node does."""
        return self._writer.place.local_rank == 0

    @public
    def save_checkpoint(
        self,
        step: int,
        files: Mapping[str, Any],
        storage_type: StorageType | None = None,
        *,
        common: Collection[str] = (),
        named: CheckpointNames = BY_STEP,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveResult:
        """Save this rank's files of a step. Once it returns, the states may be changed.

        Args:
            step: The step, not below the last one saved.
            files: By their relative paths: states, which become files of torch.save; `Tensors`, files of safetensors;
                `Raw`, files of bytes.
            storage_type: MEMORY, or DISK to have it persisted in the background as well. If left out, as
                DISK, but newer saves may overtake it while it waits for storage; with ``metrics``, exactly as DISK.
            common: Names of those files that the first rank of each node saves, with equal contents.
            named: Name of the checkpoint.
            metrics: As for `DdpCheckpointer.save_checkpoint`.

        Raises:
            ConfigError: No checkpoint can have a file, or a directory, of such a name.
            StepError, NotLoadable, ArenaTooSmall: As for `DdpCheckpointer.save_checkpoint`.
        """
        # 1. release the loaded checkpoint   2. check names   3. another history, if the same step has
        # other contents   4. save, with the names as details, which the agent needs to publish
        writer = self._writer
        arguments.saving(step, files, None, metrics)
        self.let_go()
        named.check(step)
        # The names of most saves are those of the save before.
        if files.keys() != self._checked:
            check_names(files)
            self._checked = frozenset(files)
        if named.begins_history:
            self._writer.begin_history()
        details = {FOLDER: named.folder, LATEST: named.tracker, OF_EACH_NODE: sorted(common)}
        path = f"{named.folder}/" if named.folder else ""
        if path and "://" not in writer.directory:
            path = f"{writer.directory}/{path}"
        return writer.save(step, files, storage_type, path, metrics, {k: v for k, v in details.items() if v})

    def compare(
        self,
        step: int,
        models: Sequence[torch.nn.Module],
        optimizers: Iterable[object],
        storage_type: StorageType | None,
        others: Mapping[str, Any] = MappingProxyType({}),
        *,
        broadcast: bool = False,
    ) -> None:
        """Compare the replicas of ranks before a save of this step, if that is due; all ranks call it.

        Args:
            step: Step to be saved.
            models: Modules, wrapped or not, of which one rank saves the common state.
            optimizers: Optimizers of the models.
            storage_type: As for `save_checkpoint`.
            others: Objects, or their states, that one rank saves for all, by name; a warning names unlike ones.
            broadcast: True if buffers are made equal before each forward, though no wrapper among the models shows it.

        Raises:
            ConfigError: On all ranks, if they have unlike weights, or states of an optimizer.
            ReplicasDiffer: On all ranks, if these were equal before: see `RankDifferences.turn`.
        """
        self._writer.be_ready()
        if not self._has_compared:
            for number, model in enumerate(models):
                key = f"model.{number}" if len(models) > 1 else "model"
                self._differences.leave_buffers(model, key, broadcast=broadcast)
        self._has_compared = True

        def state() -> dict[str, Any]:
            states = {name: each.state_dict() if isinstance(each, Stateful) else each for name, each in others.items()}
            return {**states, **trained_state(models, optimizers)}

        self._differences.turn(step, state, persists=storage_type is not StorageType.MEMORY)

    def scratch(self) -> Path:
        """A directory in memory for files that a framework also writes and nobody needs; of this rank alone."""
        return make_view(self._writer.link, "scratch", {})

    @public
    def find(self, resume_path: str | os.PathLike[str] = "", *, foreign: bool = False) -> NativeFolder | None:
        """Choose and verify the newest checkpoint that all ranks can load; None if nothing was ever saved.

        All ranks call it. A new history begins: saves from now on are newer than all before.

        Args:
            resume_path: A directory to load from instead of the newest checkpoint. One in the checkpoint directory is
                found by its name, be it in memory or on storage. Workers that are restarted in the same launch may
                give the same again: at their first load they go on from the newest save since then.
            foreign: True if that directory is one that something else wrote: it is taken as it is.

        Raises:
            NoLoadableCheckpoint: Checkpoints exist, but each is damaged, missing or in quarantine for some rank.
            BadCheckpoint: The one at ``resume_path`` cannot be loaded.
            ConfigError: Ranks give different paths, or nodes do not share the checkpoint directory.
            FastckptError: Another rank has failed: names it, and the reason.
        """
        # 1. agree on a new history   2. choose and verify, until all ranks have the same checkpoint
        # 3. make a directory of links to its files
        self.let_go()
        asked = arguments.path("resume_path", resume_path)
        with self._writer.ranks.sharing_errors():
            self._folder = self._find(asked.rstrip("/") or asked, foreign=foreign)
        self._differences.begin(self._folder.step if self._folder else -1)
        return self._folder

    def _find(self, asked: str, *, foreign: bool) -> NativeFolder | None:
        writer = self._writer
        ranks, offers, resume, since = writer.open_resume(self._needs, self._answers_for, asked)
        parent, _, name = normalised(asked).rpartition("/") if asked else ("", "", "")
        name = name if parent == writer.directory else ""
        # All ranks must take the same way: the first one's decides.
        foreign = bool(asked) and ranks.gather(foreign)[0]
        with writer.work("resume"):
            if asked and (foreign or not name):
                found = resume.run_path(asked, (lambda files: files) if foreign else self._kept, ranks, since)
            else:
                if writer.place.group_world_size > 1 and writer.settings.flush and not asked:
                    join_on_storage(offers, writer.link, ranks)
                found = resume.run(
                    self._kept, ranks, lambda each, offer: not name or name in _names(each, offer), since
                )
                if asked and found.state is None and ranks.decide(None, lambda _: Path(asked, MANIFEST).is_file()):
                    found = resume.run_path(asked, self._kept, ranks, since)  # one that was copied or renamed
        if found.state is None and asked:
            raise BadCheckpoint(f"{writer.directory} holds no checkpoint {name}")
        if found.state is None:
            offers.close()
            writer.resumed(found, 0.0)
            return None
        return NativeFolder(writer, offers, found, asked, name)

    def let_go(self, *, loaded: bool = True) -> None:
        """Close the folder that was found last, if it is still open, as `NativeFolder.close`."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close(loaded=loaded)

    def close(self) -> None:
        """Close, as `BaseCheckpointer.close`."""
        self.let_go(loaded=not is_failing())
        self._differences.leave()
        super().close()

    def _kept(self, files: Files) -> Files:
        if not files[self._needs.main].is_file():
            raise BadCheckpoint(f"{files[self._needs.main]} is not there")
        return files

    def _answers_for(self, files: Files, rank: int, ranks: Sequence[int]) -> list[str]:
        """Return the files that this rank checks: a part of those of several ranks, and those that only it needs."""
        own = [self._needs.own] if self._needs.own in files else []
        return own + sorted(files.keys() - {*own})[ranks.index(rank) :: len(ranks)]


def _names(candidate: CheckpointLocation, offer: Candidate) -> frozenset[str]:
    return offer.names | {called(offer.details, candidate.step)}
