"""Storage reader for DCP: loads the checkpoint that ranks have verified, from shared memory if it is there."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastckpt._core import metrics
from fastckpt._core.client.collective import Agreement
from fastckpt._core.error_codes import coded
from fastckpt._core.format.file_names import index_of, own_of, shards_of
from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import METADATA
from fastckpt._core.io.read_errors import Phase
from fastckpt._core.native.view import hold
from fastckpt._core.policy.peer_sources import holders
from fastckpt._core.policy.resume import MEMORY, CheckpointLocation
from fastckpt._core.resume.candidates import CandidateFinder, RequiredFiles
from fastckpt._core.resume.companions import Wanted
from fastckpt._core.resume.directory_checks import refuse_foreign
from fastckpt._core.resume.load import LOAD_ERRORS
from fastckpt._core.resume.resume import Resume, ResumeResult
from fastckpt._core.resume.survey import is_unreadable, join_on_storage
from fastckpt._core.resume.tiers import Fault, Files
from fastckpt._core.session import Session
from fastckpt._core.torch_private.sharding import saying_why
from fastckpt.dcp.mapped_reader import MappedReader
from fastckpt.dcp.python_values import PlannerOfValues
from fastckpt.dcp.stored_metadata import read_index, read_metadata
from fastckpt.dcp.writer import step_of
from fastckpt.errors import BadCheckpoint, FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")


TOGETHER = 30.0
"""Seconds in which all ranks come to read their plans: a planner's ``finish_plan`` alone is in between."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint as a rank knows it before reading.

    Attributes:
        files: Where they are.
        metadata: Its parts, and in which file each is.
        copies: Parts that are in this node's memory, too.
    """

    files: Files
    metadata: Metadata
    copies: dict[MetadataIndex, Any]


class KnownSaves(Protocol):
    """Writers of the checkpoints that a reader loads; ``last`` is the save that was begun last."""

    _writer: Session
    last: SaveId | None


class SharedMemoryReader(MappedReader):
    """Loads with ``dcp.load`` the newest checkpoint that all ranks can load, from memory if possible.

    With a ``checkpoint_id`` it loads that one: ``<checkpoint_dir>/checkpoint-<step>``, the step, or any directory of
    DCP. Every rank makes each load, of any number of saved ranks. Digests are compared first. Later saves are newer
    than all before.

    Args:
        writer: Writer of the same checkpoint directory.

    Attributes:
        loaded_step: Loaded step; -1 if none.
        loaded_from: Tier of the load, as of `DdpCheckpointer`.
    """

    _goes_on = False
    """True if ranks that restarted, and ask for the same again, get the newest checkpoint saved since."""

    def __init__(self, writer: KnownSaves) -> None:
        super().__init__(writer._writer.directory)
        self._saves, self._writer = writer, writer._writer
        self._asked = ""
        self._is_path = False
        self._found: tuple[ResumeResult, SaveId | None] | None = None
        self._reading: ResumeResult | None = None
        self._finder: CandidateFinder | None = None
        self._wants: Wanted = lambda *_: True
        self._since = 0.0
        self.loaded_step = -1
        self.loaded_from = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Have the next load be of this checkpoint; ``dcp.load`` calls it with its ``checkpoint_id``."""
        super().reset()
        self._let_go()
        self._asked = "" if checkpoint_id is None else str(checkpoint_id)

    def find(self) -> int | None:
        """Choose and verify the checkpoint of the next ``dcp.load``; returns its step, None if nothing was saved.

        All ranks call it, or none.

        Raises:
            (NoLoadableCheckpoint, BadCheckpoint, ConfigError, FastckptError): As `DdpCheckpointer.load_checkpoint`.
        """
        ranks = self._writer.ranks
        with ranks.sharing_errors():
            return self._find(ranks)

    def _find(self, ranks: Agreement) -> int | None:
        self._let_go()
        # 1. release the last load   2. agree on a new history   3. list this rank's candidates   4. choose and
        # verify, until all ranks have the same   5. nothing of ours: refuse a directory of another library
        writer, self._since = self._writer, time.perf_counter()
        writer.be_ready()
        asked, self._asked = self._asked, ""
        step = step_of(asked, writer.directory) if asked else None
        path = asked if step is None else f"{writer.directory}/checkpoint-{step}"
        self._is_path = bool(asked) and step is None
        since = writer.open_history(ranks, path)
        since = since if self._goes_on else {}
        shards = shards_of(writer.place.rank), index_of(writer.place.group_rank)
        needs = RequiredFiles(METADATA, METADATA, shards, from_peers=True, may_redivide=True)
        self._finder = CandidateFinder(writer.link, writer.directory, needs, digests=writer.verify != "never")
        with writer.beats.work("resume"):
            if self._is_path:
                found = self._resume.run_path(asked, self._read, ranks, since)
            else:
                self._wants = lambda each, _: step in (None, each.step)
                if writer.place.group_world_size > 1 and writer.settings.flush and not path:
                    join_on_storage(self._finder, writer.link, ranks)
                found = self._resume.run(self._read, ranks, self._wants, since)
        self._found = found, self._saves.last
        if found.state is None and not asked:
            refuse_foreign(writer.directory, ranks)
        if found.state is None:
            writer.history.go_on_from(found)
            return None
        return found.id.step if found.id else -1

    @saying_why
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata of the checkpoint that is loaded; raises the errors of `find`, or that there is none."""
        # A save since `find` may have reused the slot that was chosen. All ranks ask, because one may have skipped it.
        is_old = self._found is None or self._found[1] != self._saves.last
        if any(self._writer.ranks.gather(is_old)):
            self.find()
        assert self._found is not None
        found, self._found = self._found[0], None
        if found.state is None:
            raise NoLoadableCheckpoint(f"{self._writer.directory} holds no such checkpoint yet")
        self._hold(found)
        self._reading = found
        state: FoundCheckpoint = found.state
        self.path, metadata = state.files[METADATA].parent, state.metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See that the checkpoint has each item of the plan; raises BadCheckpoint.

        No rank waits for another here: DCP has not exchanged yet the errors of planners on some of them.
        """
        self._locate(plan)
        return plan

    def _complete(self, plan: LoadPlan, ranks: Agreement) -> None:
        """See that each rank finds the items of its plan, be it in the memory of other nodes; else all choose storage.

        The memory of one of several nodes has the items of its own ranks when they saved. In another sharding they may
        need those of others.
        """
        try:
            lacking = ranks.gather((self._writer.place.group_rank, self._locate(plan)), within=TOGETHER)
        except dist.DistStoreError as error:
            # DCP exchanges errors of a planner's finish_plan after the reads only.
            raise FastckptError(
                f"the load that was planned cannot be read: {error}. Its planner's finish_plan has raised an error "
                "there, which follows, or takes longer: do such work in create_local_plan"
            ) from error
        if any(names for _, names in lacking) and any(ranks.gather(self._bring(lacking))):
            # All ranks must choose again if one lacks something: they have to load the same save.
            assert self._reading is not None
            found = self._reading
            text = "%s in memory lacks what ranks need that are sharded otherwise: storage has it"
            logger.warning(text, found.id)
            self._choose_again(
                ranks,
                lambda each: each.tier != MEMORY,
                NoLoadableCheckpoint(
                    f"{found.id} is in the memory of the nodes that saved it, each with its own shards; another "
                    f"sharding needs them on storage, where nothing is. Start it as it was, and save to storage."
                ),
            )

    def _bring(self, lacking: Sequence[tuple[int, Sequence[str]]]) -> str:
        """Have files that ranks of this node lack brought from other nodes' memory; why that failed, empty if not."""
        assert self._reading is not None and self._reading.id is not None
        found, own = self._reading, self._writer.place.group_rank
        wanted = {name for node, names in lacking for name in names if node == own}
        if not wanted:
            return ""
        save = SaveId(*self._reading.id)
        sources = holders(found.holdings, (*save, found.attempt), own, wanted)
        if unheld := sorted(wanted - sources.keys()):
            return f"no node holds {unheld[0]}"
        try:
            with metrics.phase("resume.fetch"):
                brought = self._writer.link.fetch(save, found.attempt, sources, beside=True)
        except (FastckptError, OSError) as error:
            logger.warning("%s is not loaded from the memory of other nodes: %s", save, error)
            return str(error)
        found.state.files.update({name: Path(path) for name, path in brought.files.items()})
        return ""

    def _locate(self, plan: LoadPlan) -> list[str]:
        """Note where each item of the plan is stored; the names of files that are missing."""
        assert self._reading is not None
        found: FoundCheckpoint = self._reading.state
        known = {**found.metadata.storage_data, **found.copies}
        if unknown := [item.storage_index for item in plan.items if item.storage_index not in known]:
            raise BadCheckpoint(f"{found.files[METADATA]} is damaged: it does not say where {unknown[0]} is")
        wanted = {item.storage_index: known[item.storage_index] for item in plan.items}
        if self._reading.id is None:
            return []  # not ours: DCP finds its files
        missing = {info.relative_path for info in wanted.values()} - found.files.keys()
        self.storage_data = {
            index: replace(info, relative_path=str(found.files.get(info.relative_path)))
            for index, info in wanted.items()
        }
        return sorted(missing)

    def _choose_again(
        self, ranks: Agreement, may_be: Callable[[CheckpointLocation], bool], nothing: BaseException
    ) -> None:
        """Choose another one, of those that may be it, for the same plan; raises ``nothing`` if there is none."""
        assert self._reading is not None
        before, wants = self._reading, self._wants
        found = self._resume.run(self._read, ranks, lambda each, of: may_be(each) and wants(each, of))
        if found.state is None:
            raise nothing
        # DCP has planned this load by the first one's metadata, and does not plan again.
        is_other = found.state.metadata.state_dict_metadata != before.state.metadata.state_dict_metadata
        if any(ranks.gather(is_other)):
            raise BadCheckpoint(
                f"{found.id} has another structure than {before.id}, which cannot be loaded; load again"
            )
        self._hold(found)
        self._reading = found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the caller's tensors.

        A checkpoint that a rank cannot unpickle is skipped, in all ranks, for an older one of the same structure.

        Raises:
            NoLoadableCheckpoint: A rank finds no memory for it, for example, which is no reason to skip it.
            BadCheckpoint: The other checkpoints are states of another structure.
            FastckptError: Another rank has failed: names it, and the reason.
            FastckptError: A rank did not come to read.
        """
        # 1. bring missing parts   2. read, and vote, until all have read the same   3. release the checkpoint
        if self._writer.weights_only:
            planner = cast(LoadPlanner, PlannerOfValues(planner, self._place_of))
        # Of this load alone: a rank whose planner fails now does not come, and would be a round behind ever after.
        ranks = self._writer.ranks.sibling(f"read {self._writer.history.attempt}")
        try:
            with ranks.sharing_errors():
                self._complete(plan, ranks)
                found, done = self._read_all(plan, planner, ranks)
        finally:
            self._let_go()
        self._took(found)
        return done

    def _read_all(self, plan: LoadPlan, planner: LoadPlanner, ranks: Agreement) -> tuple[ResumeResult, Future[None]]:
        """Read the checkpoint, or the newest older one that all ranks can read; which one it was."""
        failed = set[tuple[SaveId | None, str]]()
        while True:
            assert self._reading is not None
            found, error = self._reading, None
            try:
                self._locate(plan)
                with self._writer.beats.work("resume"):
                    done = super().read_data(plan, planner)
            except LOAD_ERRORS as caught:
                error = caught
            # Also so that no rank removes files that it has downloaded for others, while they read them.
            faults = ranks.gather(error and Fault.of(error, Phase.APPLYING, found.tier))
            if not any(faults):
                return found, done
            nothing = _refused(found, faults, error, is_final=self._is_path)
            if error is not None:
                failed.add((found.id, found.tier))
            self._choose_again(ranks, lambda each: (each.id, each.tier) not in failed, nothing)

    def _place_of(self, item: ReadItem) -> str:
        """The file of an item, and its name there, for errors."""
        file = Path(self.path, self.storage_data[item.storage_index].relative_path)
        return f"{item.storage_index.fqn!r} in {file}"

    def _took(self, found: ResumeResult) -> None:
        writer, seconds = self._writer, time.perf_counter() - self._since
        self.loaded_step, self.loaded_from = found.id.step if found.id else -1, found.tier
        writer.resumed(found, seconds)

    @property
    def _resume(self) -> Resume:
        assert self._finder is not None
        return Resume(self._writer.link, self._finder, _share, self._writer.threads, self._writer.history.pairing)

    def _hold(self, found: ResumeResult) -> None:
        """Keep memory as it is until all is read."""
        hold(self._writer.link, found.state.files.values(), found.id)

    def _let_go(self) -> None:
        self._writer.link.release()
        if self._finder is not None:
            self._finder.close()
        self._found = self._reading = self._finder = None

    def _read(self, files: Files) -> FoundCheckpoint:
        """Find the place of each item in storage; called once for each checkpoint that is tried."""
        index, weights_only = files.get(index_of(self._writer.place.group_rank)), self._writer.weights_only
        metadata = read_metadata(files[METADATA], weights_only=weights_only)
        return FoundCheckpoint(files, metadata, read_index(index, weights_only=weights_only) if index else {})


def _share(files: Files, rank: int, ranks: Sequence[int]) -> list[str]:
    """Files that a rank checks, of those that all read: its own, which it reads next, and a part of the rest."""
    owners = {name: each for each in ranks for name in (shards_of(each), own_of(each))}
    own = [name for name in files if owners.get(name) == rank]
    return own + sorted(files.keys() - owners.keys())[ranks.index(rank) :: len(ranks)]


def _refused(
    found: ResumeResult, faults: Sequence[Sequence[str] | None], error: BaseException | None, *, is_final: bool
) -> BaseException:
    """Log that ranks could not read a checkpoint; the error if there is no other, which is raised if none may do."""
    of_ranks = {rank: Fault(*fault) for rank, fault in enumerate(faults) if fault}
    why = "; ".join(f"rank {rank}: {fault.why}" for rank, fault in of_ranks.items())
    if is_unreadable([*of_ranks.values()]):
        raise NoLoadableCheckpoint(
            f"{found.id} in {found.tier} is whole and cannot be read ({why}). No older checkpoint is loaded in its "
            "place. Start the job again when it can be read; or load another one by its path"
        ) from error
    nothing = error or NoLoadableCheckpoint(f"{found.id} in {found.tier} cannot be loaded ({why})")
    if is_final:
        raise BadCheckpoint(f"{found.state.files[METADATA].parent} cannot be loaded ({why})") from error
    logger.warning(coded("not resumed from %s", "FC-017"), f"{found.id} in {found.tier} ({why})")
    return nothing
