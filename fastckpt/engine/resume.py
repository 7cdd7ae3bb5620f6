"""Resumes a job: choose, verify, vote, load; no state is handed out before every rank has its own."""

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastckpt import metrics
from fastckpt.engine.agreement import Agreement
from fastckpt.engine.link import Link
from fastckpt.engine.offers import Files, Offer, Offers
from fastckpt.errors import BadCheckpoint, NoLoadableCheckpoint
from fastckpt.format.ids import SaveId
from fastckpt.policy.resume import Candidate, choose

logger = logging.getLogger("fastckpt")

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


class Resume:
    """One resume of one rank; all ranks make it together."""

    def __init__(self, link: Link, directory: Path, offers: Offers) -> None:
        self._link = link
        self._directory = directory
        self._offers = offers

    def run(self, load: Load, agreement: Agreement) -> Resumed:
        """Load the newest checkpoint that all ranks can load.

        Raises:
            NoLoadableCheckpoint: Some exist, but each is bad for some rank; says what was tried.
        """
        excluded: set[Candidate] = set()
        tried: list[str] = []
        try:
            offers = self._offers.find()
            reports = agreement.gather({"has": [list(offer) for offer in offers], "damaged": self._offers.damaged})
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
        save, offer = self._offers.at(Path(os.path.realpath(path)))
        state, votes = self._attempt(offer, load, agreement)
        if any(votes):
            raise BadCheckpoint(
                f"{path} cannot be loaded: "
                + "; ".join(f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote)
            )
        return Resumed(save, "storage", state, offer.details)

    def _attempt(self, offer: Offer, load: Load, agreement: Agreement) -> tuple[Any, list[str]]:
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


def _try(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except LOAD_ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:500]
