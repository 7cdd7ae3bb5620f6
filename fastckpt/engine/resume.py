"""Resumes a job: choose, verify, vote, load; no state is handed out before every rank has its own."""

import logging
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastckpt import metrics
from fastckpt.engine.agreement import Agreement
from fastckpt.engine.link import Link
from fastckpt.engine.offers import Files, Offer, Offers
from fastckpt.engine.verdicts import Faults, Verdicts, check
from fastckpt.errors import BadCheckpoint, FastckptError, NoLoadableCheckpoint
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
    ArithmeticError,
    AssertionError,
    BufferError,
    ImportError,
    MemoryError,
    struct.error,
    pickle.UnpicklingError,
)
"""What a damaged file can raise in torch.load."""
REPORTED = 20
"""How many bad checkpoints the saver is told of."""


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
class _Attempt:
    """What came of trying one checkpoint: a state, or what ranks have against it, and the files that they found bad."""

    state: Any = None
    objections: list[str] = field(default_factory=list)
    bad: Faults = field(default_factory=dict)


class Resume:
    """One resume of one rank; all ranks make it together.

    Args:
        answers_for: Names of the files that this rank checks, on behalf of its node.
        threads: How many of them at once.
    """

    def __init__(self, link: Link, offers: Offers, answers_for: tuple[str, ...], threads: int) -> None:
        self._link = link
        self._offers = offers
        self._answers_for = answers_for
        self._threads = threads
        self._met: list[str] = []

    def run(self, load: Load, agreement: Agreement) -> Resumed:
        """Load the newest checkpoint that all ranks can load.

        Raises:
            NoLoadableCheckpoint: Some exist, but each is bad for some rank, or they cannot even be looked for.
        """
        try:
            resumed, tried = self._newest(load, agreement, {})
        finally:
            self._link.release()
        self._report(resumed)
        if resumed is None and tried:
            raise NoLoadableCheckpoint(
                f"{self._offers.directory} holds checkpoints, but none that all ranks can load. Tried: "
                f"{'; '.join(tried)}. Restore one of them (what was set aside is in .fastckpt/quarantine-*, with a "
                f"why.txt), or, to start afresh, remove them or choose another checkpoint directory; if it is not "
                f"shared by all nodes, share it."
            )
        return resumed or Resumed(None, "", None, {})

    def run_path(self, path: str, load: Load, agreement: Agreement, details: Mapping[str, Any]) -> Resumed:
        """Load the checkpoint at ``path``: its directory or URL, or the file of its model.

        Args:
            details: Unless empty, the newest checkpoint with these details that all ranks can load goes before.

        Raises:
            BadCheckpoint: Some rank cannot load it; says which and why.
        """
        try:
            resumed, _ = self._newest(load, agreement, details) if details else (None, [])
            if resumed is not None:
                self._report(resumed)
                return resumed
            save, offer = self._at(path, agreement)
            attempt = self._attempt(offer, load, agreement)
        finally:
            self._link.release()
        if attempt.objections:
            raise BadCheckpoint(f"{path} cannot be loaded: {'; '.join(attempt.objections)}")
        resumed = Resumed(save, "storage", attempt.state, offer.details)
        self._report(resumed)
        return resumed

    def _newest(self, load: Load, agreement: Agreement, details: Mapping[str, Any]) -> tuple[Resumed | None, list[str]]:
        """The newest checkpoint with these details that all ranks can load; else None, and all that there is."""
        verdicts, excluded, there = Verdicts(self._link, self._threads), set[Candidate](), list[str]()
        resumed = None
        for look in [self._look_near, self._look] if self._offers.has_far else [self._look]:
            offers, has, others = look(agreement, details)
            there += others
            while resumed is None and (choice := choose(has, excluded)) is not None:
                attempt = self._attempt(offers[choice], load, agreement)
                if attempt.objections:
                    excluded.add(choice)
                    self._offers.drop(choice)
                    there.append(self._tell(choice, attempt.objections))
                    self._met.append(there[-1])
                    verdicts.add(choice, offers[choice], attempt.bad)
                else:
                    resumed = Resumed(SaveId(*choice.id), choice.tier, attempt.state, offers[choice].details)
            if resumed is not None:
                break
        self._met += [f"{path}: {why}" for _, path, why in self._offers.damaged]
        verdicts.carry_out(self._offers.damaged)
        return resumed, there

    def _look_near(
        self, agreement: Agreement, details: Mapping[str, Any]
    ) -> tuple[dict[Candidate, Offer], list[set[Candidate]], list[str]]:
        """As `_look`, but only what memory holds, and is as new as all that is durable: storage is not needed."""
        offers, durable = dict[Candidate, Offer](), tuple[int, ...]()
        try:
            offers, durable = self._offers.near()
        except (FastckptError, OSError) as failure:
            logger.debug("what is in memory is looked for again: %s", failure)
        reports = agreement.gather({"has": _with_details(offers, details), "durable": durable})
        least = max(tuple(report["durable"]) for report in reports)
        has = [{c for entry in report["has"] if (c := Candidate(*entry)).id >= least} for report in reports]
        return offers, has, []

    def _look(
        self, agreement: Agreement, details: Mapping[str, Any]
    ) -> tuple[dict[Candidate, Offer], list[set[Candidate]], list[str]]:
        """What this rank could load, which of that each rank could, and what else exists."""
        offers, error = {}, ""
        try:
            offers = self._offers.find()
        except (FastckptError, OSError) as failure:  # the others must not wait for this rank in vain
            error = f"{type(failure).__name__}: {failure}"
        bad = [f"{path}: {why}" for _, path, why in self._offers.damaged]
        bad += [f"{path}, set aside before: {why}" for path, why in self._offers.quarantined]
        bad += self._link.lost
        reports = agreement.gather({"has": _with_details(offers, details), "bad": bad, "error": error})
        if errors := [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]:
            text = f"{self._offers.directory} cannot be searched for checkpoints: {'; '.join(errors)}"
            offers, has, _ = self._look_near(agreement, details)
            if choose(has, ()) is None:
                raise NoLoadableCheckpoint(text)
            logger.warning("%s. What memory holds is newer, or as new.", text)
            return offers, has, [text]
        has = [{Candidate(*entry) for entry in report["has"]} for report in reports]
        return offers, has, _not_for_all(has) + sorted({text for report in reports for text in report["bad"]})

    def _at(self, path: str, agreement: Agreement) -> tuple[SaveId | None, Offer]:
        found, error = None, ""
        try:
            found = self._offers.at(path)
        except (FastckptError, OSError) as failure:  # the others must not wait for this rank in vain
            error = f"{type(failure).__name__}: {failure}"
        errors = [f"rank {rank}: {text}" for rank, text in enumerate(agreement.gather(error)) if text]
        if errors or found is None:
            raise BadCheckpoint(f"{path} cannot be loaded: {'; '.join(errors)}")
        return found

    def _attempt(self, offer: Offer, load: Load, agreement: Agreement) -> _Attempt:
        """Verify, vote, load, vote. No rank unpickles what another has found damaged: that can end the process."""
        with metrics.phase("resume.verify"):
            names = [name for name in self._answers_for if name in offer.files]
            votes = agreement.gather(check(offer, names, self._threads))
        bad = {name: why for vote in votes for name, why in vote.items()}
        objections = [f"rank {rank}: {why}" for rank, vote in enumerate(votes) for why in vote.values()]
        if objections:
            return _Attempt(None, objections, bad)
        with metrics.phase("resume.load"):
            state, objection = _try(lambda: load(offer.files))
        self._link.release()
        said = agreement.gather(objection)
        return _Attempt(state, [f"rank {rank}: {why}" for rank, why in enumerate(said) if why])

    def _report(self, resumed: Resumed | None) -> None:
        """Let the saver know, for the end of the job; one rank of each node does."""
        if self._link.place.local_rank == 0:
            try:
                self._link.tell_resumed(resumed.tier if resumed else "", self._met[:REPORTED])
            except FastckptError as error:
                logger.warning("the saver could not be told of the resume: %s", error)

    def _tell(self, choice: Candidate, objections: list[str]) -> str:
        text = f"step {choice.step} of history {choice.history} in {choice.tier} ({'; '.join(objections)})"
        metrics.counts["bad_checkpoints"] += 1
        if self._link.place.rank == 0:
            logger.warning("not resumed from %s", text)
            metrics.event("bad_checkpoint", **choice._asdict(), reason="; ".join(objections))
        return text


def _with_details(offers: Mapping[Candidate, Offer], details: Mapping[str, Any]) -> list[Candidate]:
    return [c for c, offer in offers.items() if all(offer.details.get(key) == details[key] for key in details)]


def _not_for_all(has: list[set[Candidate]]) -> list[str]:
    everywhere = set[Candidate].intersection(*has)
    found = []
    for candidate in sorted(set[Candidate].union(*has) - everywhere):
        lacking = [rank for rank, report in enumerate(has) if candidate not in report]
        found.append(f"step {candidate.step} in {candidate.tier} (not there for ranks {lacking})")
    return found


def _try(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except LOAD_ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:500]
