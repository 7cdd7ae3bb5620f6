"""Resumes a job: choose, verify, vote, load; no state is handed out before every rank has its own."""

import logging
import pickle
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.data.generators import generators_kept
from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.resume import CheckpointLocation
from fastckpt._core.resume.bad_checkpoints import BadCheckpoints, Faults, check
from fastckpt._core.resume.candidates import Candidate, CandidateFinder, Files
from fastckpt._core.resume.companions import Pairing
from fastckpt._core.resume.survey import Wanted, everywhere, near
from fastckpt._core.resume.unreadable_checkpoints import UnreadableCheckpoints, is_unreadable
from fastckpt.errors import BadCheckpoint, FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")

Load = Callable[[Files], Any]
Share = Callable[[Files, int, Sequence[int]], Sequence[str]]
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
class ResumeResult:
    """What a rank resumed.

    Attributes:
        id: The checkpoint; None if none was ever saved.
        tier: One of `TIERS`; empty if there was none.
        state: What this rank's loader made of its files.
        details: What was kept with the checkpoint.
        elsewhere: Whether it is of another checkpoint directory, whose histories are others.
    """

    id: SaveId | None
    tier: str
    state: Any
    details: dict[str, Any]
    elsewhere: bool = False


@dataclass(frozen=True)
class _Attempt:
    """What came of trying one checkpoint: a state, or what each rank has against it, and which files it found bad."""

    state: Any = None
    objections: dict[int, list[str]] = field(default_factory=dict)
    bad: dict[int, Faults] = field(default_factory=dict)

    def of(self, ranks: Collection[int]) -> list[str]:
        """What some of the ranks have against it."""
        return [f"rank {rank}: {why}" for rank in ranks for why in self.objections.get(rank, ())]


class Resume:
    """One resume of one rank; all ranks make it together.

    Args:
        answers_for: Which of a checkpoint's files this rank checks, given its number and those of all that
            read the same, itself among them.
        threads: How many of them at once.
        pairing: What other checkpointers of the job can go on from.
    """

    def __init__(
        self, link: SaverClient, offers: CandidateFinder, answers_for: Share, threads: int, pairing: Pairing
    ) -> None:
        self._link = link
        self._offers = offers
        self._answers_for = answers_for
        self._threads = threads
        self._pairing = pairing
        self._met: list[str] = []
        self._abandoned: list[list[int]] = []

    @generators_kept()  # clients of stores draw from the generator of Python when they try again
    def run(
        self,
        load: Load,
        agreement: Agreement,
        wanted: Wanted = lambda *_: True,
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> ResumeResult:
        """Load the newest checkpoint, of those that are wanted, that all ranks can load; ``details`` as in `run_path`.

        Raises:
            NoLoadableCheckpoint: Some exist, but each is bad for some rank, or they cannot even be looked for.
        """
        try:
            resumed = self._newest_paired(load, agreement, partial(_has_details, details))[0] if details else None
            resumed, tried = (resumed, []) if resumed else self._newest_paired(load, agreement, wanted)
        finally:
            self._link.release()
        self._tell_of_unfinished(resumed)
        self._report(resumed)
        if resumed is None and tried:
            raise NoLoadableCheckpoint(
                f"{self._offers.directory} holds checkpoints, but none that all ranks can load. Tried: "
                f"{'; '.join(tried)}. Restore one of them (what was set aside is in .fastckpt/quarantine-*, with a "
                f"why.txt), or, to start afresh, remove them or choose another checkpoint directory; if it is not "
                f"shared by all nodes, share it."
            )
        return resumed or ResumeResult(None, "", None, {})

    @generators_kept()
    def run_path(self, path: str, load: Load, agreement: Agreement, details: Mapping[str, Any]) -> ResumeResult:
        """Load the checkpoint at ``path``: its directory or URL, or the file of its model.

        Args:
            details: Unless empty, the newest checkpoint with these details that all ranks can load goes before.

        Raises:
            BadCheckpoint: Some rank cannot load it; says which and why.
        """
        try:
            rolled_back = partial(_has_details, details)
            resumed = self._newest_paired(load, agreement, rolled_back)[0] if details else None
            if resumed is not None:
                self._report(resumed)
                return resumed
            save, offer, nodes = self._at(path, agreement)
            attempt = self._attempt(offer, self._sharing(["storage"] * len(nodes), nodes), load, agreement)
        finally:
            self._link.release()
        if attempt.objections:
            raise self._bad(path, attempt.of(range(len(nodes))))
        resumed = ResumeResult(save, "storage", attempt.state, offer.details, self._offers.is_elsewhere(offer))
        self._report(resumed)
        return resumed

    def _newest_paired(self, load: Load, agreement: Agreement, wanted: Wanted) -> tuple[ResumeResult | None, list[str]]:
        """`_newest` of those that other checkpointers of the job have, too; of all, if there is none."""

        def paired(candidate: CheckpointLocation, offer: Candidate) -> bool:
            return wanted(candidate, offer) and self._pairing.accepts(candidate, offer)

        resumed, tried = self._newest(load, agreement, paired)
        if resumed is None and any(agreement.gather(bool(self._pairing.refused))):
            return self._newest(load, agreement, wanted)
        if resumed is not None and resumed.id is not None and self._link.place.rank == 0:
            self._pairing.report(resumed.id, self._offers.directory)
        return resumed, tried

    def _newest(self, load: Load, agreement: Agreement, wanted: Wanted) -> tuple[ResumeResult | None, list[str]]:
        """The newest wanted checkpoint that all ranks can load; else None, and all that there is."""
        verdicts, excluded, there = BadCheckpoints(self._link, self._threads), set[CheckpointLocation](), list[str]()
        unread, resumed = UnreadableCheckpoints(agreement, self._link.place.rank), None
        for look in [near, everywhere] if self._offers.has_far else [everywhere]:
            seen = look(self._offers, self._link, agreement, wanted)
            there += seen.others
            while resumed is None and (choices := unread.choose(seen.has, excluded)) is not None:
                mine = choices[self._link.place.rank]
                offer = seen.offers[mine]
                attempt = self._attempt(offer, self._sharing(choices, seen.nodes), load, agreement)
                if not attempt.objections:
                    resumed = ResumeResult(SaveId(*mine.id), mine.tier, attempt.state, offer.details)
                    if self._link.place.group_world_size > 1:
                        self._abandoned = _newer_in_memory(mine, seen.has[self._link.place.rank])
                    break
                for bad in sorted({choices[rank] for rank in attempt.objections}):
                    excluded.add(bad)
                    objections, faults = _objections(bad, choices, attempt), _faults(bad, choices, attempt)
                    if is_unreadable(faults.values()):
                        unread.add(bad, f"{_named(bad)} is whole and cannot be read ({objections})")
                    else:
                        there.append(self._reject(bad, objections))
                        verdicts.add(bad, seen.offers.get(bad), faults)
                    self._offers.drop(bad)
            if resumed is not None:
                break
        self._met += [f"{path}: {why}" for _, path, why in self._offers.damaged]
        verdicts.carry_out(self._offers.damaged)
        return resumed, there

    def _sharing(self, choices: Sequence[Any], nodes: Sequence[int]) -> list[int]:
        """The ranks that read what this one reads; of what may be downloaded, those of its node."""
        rank = self._link.place.rank
        same = [each for each, choice in enumerate(choices) if choice == choices[rank]]
        return [each for each in same if nodes[each] == nodes[rank] or not self._offers.has_far]

    def _at(self, path: str, agreement: Agreement) -> tuple[SaveId | None, Candidate, list[int]]:
        found, error = None, ""
        try:
            found = self._offers.at(path)
        except (FastckptError, OSError) as failure:  # the others must not wait for this rank in vain
            error = f"{type(failure).__name__}: {failure}"
        reports = agreement.gather([error, self._link.place.group_rank])
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text]
        if errors or found is None:
            raise self._bad(path, errors)
        return *found, [node for _, node in reports]

    def _bad(self, path: str, why: Sequence[str]) -> BadCheckpoint:
        there = f"fastckpt ls {self._offers.directory} shows what there is"
        return BadCheckpoint(f"{path} cannot be loaded: {'; '.join(why)}. {there}")

    def _attempt(self, offer: Candidate, sharing: list[int], load: Load, agreement: Agreement) -> _Attempt:
        """Verify, vote, load, vote. No rank unpickles what another has found damaged: that can end the process."""
        names = self._answers_for(offer.files, self._link.place.rank, sharing)
        with metrics.phase("resume.verify"):
            votes = agreement.gather(check(offer, list(names), self._threads))
        if any(votes):
            bad = {rank: vote for rank, vote in enumerate(votes) if vote}
            return _Attempt(None, {rank: list(vote.values()) for rank, vote in bad.items()}, bad)
        with metrics.phase("resume.load"):
            state, objection = _try(lambda: load(offer.files))
        self._link.release()
        said = agreement.gather(objection)
        return _Attempt(state, {rank: [why] for rank, why in enumerate(said) if why})

    def _tell_of_unfinished(self, resumed: ResumeResult | None) -> None:
        """Say what nodes were writing that is newer than what all go on from; the first rank knows of it."""
        save = resumed.id if resumed else None
        for each in self._offers.unfinished:
            if save is None or each.id > save:
                instead = f"{save} is resumed" if save else "nothing older is there"
                hint = "If that is not so, they wrote elsewhere: see that all nodes share the directory."
                logger.warning("%s on storage is not resumed: %s; %s. %s", each.id, each.why, instead, hint)
                self._met.append(f"{each.id} on storage: {each.why}")

    def _report(self, resumed: ResumeResult | None) -> None:
        """Let the saver know, for the end of the job; one rank of each node does."""
        if self._link.place.local_rank == 0:
            try:
                self._link.tell_resumed(resumed.tier if resumed else "", self._met[:REPORTED], self._abandoned)
            except FastckptError as error:
                logger.warning("the saver could not be told of the resume: %s", error)

    def _reject(self, bad: CheckpointLocation, objections: str) -> str:
        """Say what speaks against a checkpoint."""
        text = f"{_named(bad)} ({objections})"
        metrics.counts["bad_checkpoints"] += 1
        self._met.append(text)
        if self._link.place.rank == 0:
            logger.warning("not resumed from %s", text)
            history, step, tier, *_ = bad
            metrics.event("bad_checkpoint", history=history, step=step, tier=tier, reason=objections)
        return text


def _newer_in_memory(chosen: CheckpointLocation, has: Collection[CheckpointLocation]) -> list[list[int]]:
    """What was wanted, and is in memory here, but not with all ranks."""
    return [list(each.id) for each in sorted(has) if each.tier == "memory" and each.id > chosen.id]


def _named(candidate: CheckpointLocation) -> str:
    return f"step {candidate.step} of history {candidate.history} in {candidate.where}"


def _objections(bad: CheckpointLocation, choices: Sequence[CheckpointLocation], attempt: _Attempt) -> str:
    found = attempt.of([rank for rank, choice in enumerate(choices) if choice == bad])
    return "; ".join(dict.fromkeys(found))


def _faults(bad: CheckpointLocation, choices: Sequence[CheckpointLocation], attempt: _Attempt) -> Faults:
    """The files of a checkpoint that ranks found bad, in the place where they looked; damage before what is unread."""
    votes = [vote for rank, vote in attempt.bad.items() if choices[rank] == bad]
    found = [(name, why) for vote in votes for name, why in vote.items()]
    return dict(sorted(found, key=lambda fault: not is_unreadable([fault[1]])))


def _has_details(details: Mapping[str, Any], _: CheckpointLocation, offer: Candidate) -> bool:
    return all(offer.details.get(key) == details[key] for key in details)


def _try(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except LOAD_ERRORS as error:
        return None, f"{type(error).__name__}: {error}"[:500]
