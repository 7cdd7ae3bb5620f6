"""Saves and loads a DeepSpeed engine, with DeepSpeed's own arguments."""

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from inspect import BoundArguments, signature
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from fastckpt._core.arguments import public
from fastckpt._core.base_checkpointer import BaseCheckpointer
from fastckpt._core.client.flash_options import FlashOptions
from fastckpt._core.client.save_results import at_least
from fastckpt._core.format.file_names import own_of
from fastckpt._core.io.regular_file import read_small
from fastckpt._core.metrics import phase
from fastckpt._core.native.checkpoint_names import is_foreign
from fastckpt._core.native.folder_checkpointer import (
    CheckpointNames,
    FolderCheckpointer,
    NativeFolder,
    Raw,
    RequiredFiles,
)
from fastckpt._core.resume.load import load_copy
from fastckpt._core.retention import CheckpointDeletionStrategy
from fastckpt._core.session import SaveResult, SessionOptions, StorageType
from fastckpt._core.storage.store import is_url, normalised
from fastckpt.deepspeed._private import accumulated, not_universal
from fastckpt.deepspeed.engine_files import check, files_of, loading, reads
from fastckpt.deepspeed.extra_state import SCRIPTS, own_state, put_scripts, restore_own
from fastckpt.deepspeed.static_tensors import beside, steppers
from fastckpt.deepspeed.topology import NAME, check_fits, read, written
from fastckpt.errors import ConfigError

logger = logging.getLogger("fastckpt")

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
LONGEST_TAG = 4096
"""Bytes of one of these files."""
_AMID = (
    "step %d is saved when %d micro-batches were added up to gradients, which are no part of DeepSpeed's checkpoints: "
    "what resumes from it goes on without them. Save after the engine.step() that updates the weights."
)
Loaded = tuple[str | None, dict[str, Any] | None]


class DeepSpeedCheckpointer(BaseCheckpointer):
    """Saves the files of a DeepSpeed engine to memory and storage, and has the engine load them from there.

    Files are DeepSpeed's own: its ``load_checkpoint``, zero_to_fp32.py and ds_to_universal.py read them. Every rank
    constructs one, and calls each method with the same arguments. DeepSpeed loads with ``weights_only=False``, which
    may run code of a file.

    Args:
        engine: Engine of ``deepspeed.initialize``.
        checkpoint_dir: As for `DdpCheckpointer`; so are ``deletion_strategy``, ``verify``, ``remote`` and
            ``remote_deletion_strategy``.
        overlap: Copy weights and optimizer states during the next forward and backward; only steps may change them.

    Raises:
        ConfigError: The engine cannot be saved, as with an optimizer on NVMe, or not with ``overlap``; or as for
            `DdpCheckpointer`.
        PlaceInUse: As for `DdpCheckpointer`.

    Attributes:
        loaded_step: ``global_steps`` of the loaded checkpoint; -1 if none, or if DeepSpeed saved it.
        loaded_from: Tier of the load, as of `DdpCheckpointer`.
    """

    @public
    def __init__(  # noqa: PLR0913  # the options of users, spelled out
        self,
        engine: DeepSpeedEngine,
        checkpoint_dir: str | os.PathLike[str],
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        *,
        verify: str = "resume",
        overlap: bool = False,
        remote: str | os.PathLike[str] = "",
        remote_deletion_strategy: CheckpointDeletionStrategy | None = None,
        replica_count: int = 0,
        comm_backend: str = "",
        save_timeout: int = 0,
        local_shard_num: int = 0,
        global_shard_num: int = 0,
    ) -> None:
        if not isinstance(engine, DeepSpeedEngine):
            raise ConfigError(f"{type(engine).__name__} is no DeepSpeedEngine: give what deepspeed.initialize returned")
        check(engine)
        self._engine = engine
        self._own = own_of(engine.global_rank)
        needs = RequiredFiles(NAME, self._own, reads(engine), from_peers=True)
        optimizers = steppers(engine) if overlap else []
        options = SessionOptions(
            weights_only=False,
            verify=verify,
            remote=remote,
            remote_deletion_strategy=remote_deletion_strategy,
            flash=FlashOptions(replica_count, comm_backend, save_timeout, local_shard_num, global_shard_num),
        )
        self._folders = FolderCheckpointer(checkpoint_dir, needs, deletion_strategy, options)
        self._writer = self._folders.session
        self._writer.overlap_with(optimizers, lambda: beside(engine))
        self._writer.count_steps(lambda: int(engine.global_steps))
        self._has_scripts = self._has_warned = False
        self._last: tuple[int, str] | None = None
        self.loaded_step = -1
        self.loaded_from = ""

    @public
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        storage_type: StorageType | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> SaveResult:
        """Save the engine, as its own ``save_checkpoint``. Training may continue after the call.

        A step in memory with this tag is not copied again; DISK persists it. If every slot is in use, all ranks skip
        the save.

        Args:
            save_dir: The checkpoint directory.
            tag: Name; default ``global_step<engine.global_steps>``.
            client_state: More state, with ordinary keys.
            save_latest: Name it in ``latest`` once it is durable.
            storage_type: As for `DdpCheckpointer.save_checkpoint`; with a ``tag``, the default is DISK.
            exclude_frozen_parameters: Leave these out.

        Raises:
            ConfigError: ``save_dir`` is another directory, or ``tag`` is no name for one.
            StepError: The engine went back without a load.
            (NotLoadable, ArenaTooSmall): As `DdpCheckpointer.save_checkpoint`.
        """
        # 1. DeepSpeed's own files, taken from its checkpoint engine instead of written   2. generators and buffers of
        # this rank   3. the topology, in the first rank of each node   4. scripts, once   5. save
        self._writer.be_ready()
        engine, folders, storage_type = self._engine, self._folders, at_least(storage_type, tag is not None)
        step, tag = engine.global_steps, str(f"global_step{engine.global_steps}" if tag is None else tag)
        named = self._named(save_dir, tag, step, save_latest=save_latest)
        if (micro := accumulated(engine)) and not self._has_warned:
            self._has_warned = True
            logger.warning(_AMID, step, micro)
        folders.let_go()
        folders.compare(step, [engine], [engine.optimizer], storage_type, {"client_state": dict(client_state)})
        with self._writer.stall("save"), phase("snapshot.engine", step=step):
            files = files_of(
                engine,
                folders.scratch(),
                tag,
                client_state,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        files[self._own] = own_state(engine)
        if folders.writes_common:
            files[NAME] = Raw(written(engine), may_end_with_spaces=True)
        if storage_type is not StorageType.MEMORY and not self._has_scripts:
            put_scripts(engine, self._writer.directory)
            self._has_scripts = True
        self._last = step, tag
        return folders.save_checkpoint(step, files, storage_type, common=[NAME], named=named)

    @public
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        *arguments: Any,
        **named: Any,
    ) -> Loaded:
        """Have the engine load the newest checkpoint that all ranks can load, from memory if possible.

        All ranks call it. Random generators are restored if this class saved them for as many ranks.

        Args:
            load_dir: The checkpoint directory, or another one of any writer. Restarted workers: as for
                `DdpCheckpointer.load_checkpoint`.
            tag: Checkpoint to load; None: the newest, or ``latest`` of another directory.
            arguments: More arguments of DeepSpeed's ``load_checkpoint``, also by name.

        Returns:
            Path and client state, as DeepSpeed's; None and None if nothing was saved.

        Raises:
            ConfigError: DeepSpeed cannot load it on so many ranks or with this ZeRO stage, or the engine has unused
                gradients. Nothing is applied.
            (NoLoadableCheckpoint, BadCheckpoint): As `DdpCheckpointer.load_checkpoint`.
        """
        # 1. refuse waiting gradients   2. choose and verify
        # 3. check the topology   4. the engine loads   5. generators
        if micro := accumulated(self._engine):
            raise ConfigError(
                f"the engine has gradients of {micro} micro-batches, which its next step would add to what is loaded: "
                "load before training, after a step that updates weights, or into a new engine"
            )
        given = signature(self._engine.load_checkpoint).bind(load_dir, tag, *arguments, **named)
        asked = self._asked(load_dir, "" if tag is None else str(tag))
        self.loaded_step, self.loaded_from, self._last = -1, "", None
        with self._writer.work("resume"):
            with self._writer.ranks.sharing_errors():
                folder = self._find(asked)
            if folder is None:
                return None, None
            with folder:
                loaded = self._load(folder, given)
        self.loaded_step, self.loaded_from = folder.step, folder.tier
        return loaded

    def close(self) -> None:
        """End saving."""
        self._folders.close()

    def _find(self, asked: str) -> NativeFolder | None:
        """The checkpoint at a path; without one of ours, the newest of DeepSpeed in the checkpoint directory."""
        directory = self._writer.directory
        folder = self._folders.find(asked, foreign=bool(asked) and _is_foreign(asked))
        theirs = "" if asked else _latest(directory, LATEST)
        theirs = self._writer.ranks.gather(theirs if theirs and _is_foreign(theirs) else "")[0]
        if asked or not theirs:
            return folder
        if folder is None:
            logger.info("%s is loaded, which DeepSpeed has written by itself", theirs)
            return self._folders.find(theirs, foreign=True)
        logger.warning(
            "%s, which DeepSpeed has written by itself, is passed over for step %d, which this class has saved; "
            "to load it give its tag",
            theirs,
            folder.step,
        )
        return folder

    def _load(self, folder: NativeFolder, given: BoundArguments) -> Loaded:
        engine, is_ours = self._engine, (folder.path / NAME).is_file()
        where = f"{self._writer.directory}/{folder.path.name}" if folder.step >= 0 else str(folder.path)
        if is_ours:
            said = given.arguments
            with_optimizer = said.get("load_optimizer_states", True) and not said.get("load_module_only", False)
            check_fits(read(folder.path / NAME), engine, where, with_optimizer=with_optimizer)
        if folder.step >= 0:
            # DeepSpeed reads this file itself when it reassembles a model of ZeRO 3
            (folder.path.parent / LATEST).write_text(folder.path.name)
        with loading(engine, self._writer.threads), not_universal(engine) if is_ours else nullcontext():
            # The engine loads from the directory of links; paths in
            # its answer are replaced by where the checkpoint will be.
            given.arguments |= {"load_dir": str(folder.path.parent), "tag": folder.path.name}
            path, client_state = engine.load_checkpoint(*given.args, **given.kwargs)
        own = folder.path / self._own
        if own.is_file():
            restore_own(engine, load_copy(own, 1, weights_only=True))
        else:
            logger.warning("rank %d has no random generators in %s: they go on as they are", engine.global_rank, where)
        return path and path.replace(str(folder.path), where, 1), client_state

    def _named(self, save_dir: str | os.PathLike[str], tag: str, step: int, *, save_latest: bool) -> CheckpointNames:
        directory = self._writer.directory
        if normalised(save_dir) != directory:
            raise ConfigError(f"save_dir is {os.fspath(save_dir)}: this checkpointer saves to {directory}; give that")
        if not tag or tag in (LATEST, LATEST_UNIVERSAL, *SCRIPTS):
            raise ConfigError(
                f"a checkpoint cannot be called {tag!r}, as DeepSpeed has files of such names: choose another"
            )
        is_other = self._last is not None and self._last[0] == step and self._last[1] != tag
        named = CheckpointNames(tag, LATEST if save_latest else "", begins_history=is_other)
        named.check(step)
        return named

    def _asked(self, load_dir: str | os.PathLike[str], tag: str) -> str:
        """The directory to go back to; empty for the newest checkpoint."""
        place, universal = normalised(load_dir), self._engine.load_universal_checkpoint()
        if tag or (place == self._writer.directory and not universal):
            return f"{place}/{tag}" if tag else ""
        name = LATEST_UNIVERSAL if universal else LATEST
        newest = _latest(place, name)
        if not newest and universal:
            raise ConfigError(f"{place} has no {name}: give the tag of a universal checkpoint, or do not ask for one")
        if not newest:
            logger.warning("%s has no %s: the newest in %s is loaded", place, name, self._writer.directory)
        return newest


def _latest(directory: str, tracker: str) -> str:
    """The checkpoint that a file of a directory names; empty if there is none.

    Raises ConfigError if the file cannot be read, or names none there: another user may have written it.
    """
    file = Path(directory, tracker)
    if is_url(directory) or not file.exists():
        return ""
    try:
        tag = read_small(file, LONGEST_TAG, follow=True).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}. Give the tag of a checkpoint") from error
    if not tag or not Path(tag).name or Path(tag).is_absolute() or ".." in Path(tag).parts or not tag.isprintable():
        raise ConfigError(f"{file} names {tag!r}, which is no checkpoint in {directory}. Give the tag of one")
    return f"{directory}/{tag}"


def _is_foreign(directory: str) -> bool:
    """Return whether DeepSpeed, or one of its tools, wrote it."""
    return is_foreign(directory) and not Path(directory, NAME).exists()
