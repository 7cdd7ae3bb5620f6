"""Resumes a job: choose, verify, vote, load; no state is handed out before every rank has its own."""

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastckpt import metrics
from fastckpt.engine.agreement import Agreement
from fastckpt.engine.link import Link
from fastckpt.errors import BadCheckpoint, NoLoadableCheckpoint
from fastckpt.format.ids import SaveId
from fastckpt.format.manifest import MODEL
from fastckpt.memory import slots
from fastckpt.policy.resume import Candidate, choose
from fastckpt.storage.directory import CheckpointDirectory, Stored

logger = logging.getLogger("fastckpt")

Files = dict[str, Path]
Load = Callable[[Files], Any]
LOAD_ERRORS = (
    BadCheckpoint,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    pickle.UnpicklingError,
)
"""What a damaged file can raise in torch.load."""


@dataclass(frozen=True)
class Resumed:
    """What a rank resumed.

    Attributes:
        id: The checkpoint; None if none was ever saved.
        tier: "memory" or "storage"; empty if there was none.
        state: What this rank's loader made of its files.
        details: What was kept with the checkpoint.
    """

    id: SaveId | None
    tier: str
    state: Any
    details: dict[str, Any]


@dataclass(frozen=True)
class _Offer:
    """A checkpoint that this rank could load."""

    files: Files
    details: dict[str, Any]
    verify: Callable[[], None]


class Resume:
    """One resume of one rank; all ranks make it together.

    Args:
        own: Name of the file with this rank's own part; a checkpoint of fewer ranks may lack it.
        verifies: Names of those whose digests it checks, on behalf of its node.
    """

    def __init__(self, link: Link, directory: Path, own: str, verifies: tuple[str, ...]) -> None:
        self._link = link
        self._directory = directory
        self._own = own
        self._verifies = verifies
        self._damaged: list[str] = []

    def run(self, load: Load, agreement: Agreement) -> Resumed:
        """Load the newest checkpoint that all ranks can load.

        Raises:
            NoLoadableCheckpoint: Some exist, but each is bad for some rank; says what was tried.
        """
        excluded: set[Candidate] = set()
        tried: list[str] = []
        try:
            offers = self._offers()
            reports = agreement.gather({"has": [list(offer) for offer in offers], "damaged": self._damaged})
            has = [{Candidate(*entry) for entry in report["has"]} for report in reports]
            while (choice := choose(has, excluded)) is not None:
                state, votes = self._attempt(offers[choice], load, agreement)
                if not any(votes):
                    return Resumed(SaveId(*choice.id), choice.tier, state, offers[choice].details)
                excluded.add(choice)
                reason = "; ".join(f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote)
                tried.append(f"step {choice.step} of history {choice.history} in {choice.tier} ({reason})")
                logger.warning("not resumed from %s", tried[-1])
                metrics.counts["bad_checkpoints"] += 1
            self._refuse_a_fresh_start(has, tried, [text for report in reports for text in report["damaged"]])
        finally:
            self._link.release()
        return Resumed(None, "", None, {})

    def run_path(self, path: Path, load: Load, agreement: Agreement) -> Resumed:
        """Load the checkpoint at ``path``: its directory, or the file of its model.

        Raises:
            BadCheckpoint: Some rank cannot load it; says which and why.
        """
        save, offer = self._at(Path(os.path.realpath(path)))
        state, votes = self._attempt(offer, load, agreement)
        if any(votes):
            raise BadCheckpoint(
                f"{path} cannot be loaded: "
                + "; ".join(f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote)
            )
        return Resumed(save, "storage", state, offer.details)

    def _at(self, path: Path) -> tuple[SaveId | None, _Offer]:
        """What lies at a path: a checkpoint of this directory, or files that something else wrote."""
        model = path / MODEL if path.is_dir() else path
        directory = CheckpointDirectory(self._directory)
        for stored in directory.scan().places:
            if os.path.realpath(stored.path_of(MODEL)) == str(model):
                files = {entry.name: stored.path_of(entry.name) for entry in stored.manifest.files}
                verify = partial(self._verify, [(directory, stored)])
                return stored.id, _Offer(files, dict(stored.manifest.details), verify)
        own = {found.name: found for found in model.parent.glob("rank_*.pt")} if path.is_dir() else {}
        return None, _Offer({MODEL: model, **own}, {}, lambda: None)

    def _attempt(self, offer: _Offer, load: Load, agreement: Agreement) -> tuple[Any, list[str]]:
        """Verify, vote, load, vote: what was loaded, and the objection of each rank, empty for none.

        No rank unpickles what another has found damaged: that can end the process.
        """
        with metrics.phase("resume.verify"):
            _, objection = _try(offer.verify)
        votes = agreement.gather(objection)
        if any(votes):
            return None, votes
        with metrics.phase("resume.load"):
            state, objection = _try(lambda: load(offer.files))
        self._link.release()
        return state, agreement.gather(objection)

    def _refuse_a_fresh_start(self, has: list[set[Candidate]], tried: list[str], damaged: list[str]) -> None:
        everywhere = set[Candidate].intersection(*has)
        for candidate in sorted(set[Candidate].union(*has) - everywhere):
            lacking = [rank for rank, report in enumerate(has) if candidate not in report]
            tried.append(f"step {candidate.step} in {candidate.tier} (not there for ranks {lacking})")
        tried += sorted(set(damaged))
        if tried:
            raise NoLoadableCheckpoint(
                f"{self._directory} holds checkpoints, but none that all ranks can load. Tried: {'; '.join(tried)}. "
                f"Restore one of them, or choose another checkpoint directory to start afresh; if it is not shared "
                f"by all nodes, share it."
            )

    def _offers(self) -> dict[Candidate, _Offer]:
        stored = self._on_storage()
        if self._link.place.group_world_size > 1:
            return stored  # nodes do not agree on what is in memory yet
        return self._in_memory() | stored

    def _in_memory(self) -> dict[Candidate, _Offer]:
        offers = {}
        for slot in self._link.pin():
            records = slots.read(slot)
            if records.committed is None:
                continue
            files = {name: slot / name for name in records.files}
            if self._suffices(files, records.details.get("world_size", 1)):
                candidate = Candidate(*records.committed, "memory")
                offers[candidate] = _Offer(files, records.details, partial(_check_sizes, files, records.files))
        return offers

    def _on_storage(self) -> dict[Candidate, _Offer]:
        directories = [self._directory, *sorted(self._directory.glob(".fastckpt/node-*"))]
        parts: dict[SaveId, list[tuple[CheckpointDirectory, Stored]]] = {}
        for path in directories:
            directory = CheckpointDirectory(path)
            scan = directory.scan()
            self._damaged += [f"{where}: {why}" for where, why in scan.damaged]
            for stored in scan.whole:
                parts.setdefault(stored.id, []).append((directory, stored))
        offers = {}
        for save, found in parts.items():
            files = {entry.name: stored.path_of(entry.name) for _, stored in found for entry in stored.manifest.files}
            if self._suffices(files, found[0][1].manifest.world_size):
                details = dict(found[0][1].manifest.details)
                offers[Candidate(*save, "storage")] = _Offer(files, details, partial(self._verify, found))
        return offers

    def _suffices(self, files: Files, world_size: int) -> bool:
        """Whether this rank finds all that it can expect of a checkpoint of ``world_size`` ranks."""
        return MODEL in files and (self._own in files or self._link.place.rank >= world_size)

    def _verify(self, found: list[tuple[CheckpointDirectory, Stored]]) -> None:
        for directory, stored in found:
            names = [entry.name for entry in stored.manifest.files if entry.name in self._verifies]
            directory.verify(stored, names)


def _try(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except LOAD_ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:500]


def _check_sizes(files: Files, sizes: dict[str, int]) -> None:
    for name, path in files.items():
        if path.stat().st_size != sizes[name]:
            raise BadCheckpoint(f"{path} has {path.stat().st_size} bytes; it was committed with {sizes[name]}")
