"""Resumes a job: survey, choose, verify, vote, load, vote; no state is handed out before every rank has its own."""

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from types import MappingProxyType
from typing import Any

from fastckpt._core import metrics
from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.data.generators import generators_kept
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.read_errors import Phase
from fastckpt._core.policy.peer_sources import NodeHolding, unheld_ranks
from fastckpt._core.policy.resume import MEMORY, PEER, STATELESS, STORAGE, CheckpointLocation
from fastckpt._core.resume.candidates import CandidateFinder
from fastckpt._core.resume.companions import Pairing, Selection, Wanted
from fastckpt._core.resume.load import LOAD_ERRORS
from fastckpt._core.resume.survey import Chooser, Survey, everywhere, is_unreadable, near, obstacles
from fastckpt._core.resume.tiers import Candidate, Fault, Faults, Files, Rejected, RejectionKind
from fastckpt.errors import BadCheckpoint, FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")

Load = Callable[[Files], Any]
Share = Callable[[Files, int, Sequence[int]], Sequence[str]]
REPORTED = 20
"""Bad checkpoints that are reported to the saver, at most."""


@dataclass(frozen=True)
class ResumeResult:
    """The result of a resume, of one rank.

    Attributes:
        id: The checkpoint; None if none was ever saved.
        tier: One of `TIERS`; empty if there was none.
        state: The result of this rank's loader.
        details: The details saved with the checkpoint.
        elsewhere: True if it is of another checkpoint directory, whose histories are numbered independently.
        attempt: The token that ranks of all nodes shared when they saved it.
        holdings: Holdings of all nodes in memory, of saves of several nodes.
        passed_over: Durable checkpoints that are newer, and could not be loaded.
    """

    id: SaveId | None
    tier: str
    state: Any
    details: dict[str, Any]
    elsewhere: bool = False
    attempt: str = ""
    holdings: Sequence[NodeHolding] = ()
    passed_over: Sequence[SaveId] = ()


class Resume:
    """One resume of one rank; all ranks make it together.

    Args:
        answers_for: Selects the files of a checkpoint that this rank checks, given its number and those of all ranks
            that read the same files, this one included.
        threads: Files that are checked at once.
        pairing: The constraints from other checkpointers of the job.
    """

    def __init__(
        self, client: SaverClient, finder: CandidateFinder, answers_for: Share, threads: int, pairing: Pairing
    ) -> None:
        self._client, self._finder = client, finder
        self._answers_for, self._threads, self._pairing = answers_for, threads, pairing
        self._place = client.place
        self._bad: list[str] = []
        self._unfinished: Sequence[Rejected] = ()
        self._abandoned: list[list[int]] = []
        self._cause: BaseException | None = None

    # A resume of the newest checkpoint, of all ranks together:
    #   survey   each rank lists the saves in its tiers, and the ranks exchange these         survey.near, .everywhere
    #   choose   the newest save that all can load; each rank takes it from the nearest tier  survey.Chooser
    #   verify   each rank checks its part of the files, and votes                            _attempt
    #   load     each rank loads, and votes                                                   _attempt
    #   exclude  a save that some rank objects to is excluded, and the ranks choose again     _exclude
    #   reject   bad files are quarantined (storage) or given up (memory)                     CandidateFinder.reject
    #   report   the saver learns the resumed save, and those that could not be resumed       _report
    @generators_kept()  # clients of stores draw from the generator of Python when they try again
    def run(
        self,
        load: Load,
        ranks: Agreement,
        wanted: Wanted = lambda *_: True,
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> ResumeResult:
        """Load the newest checkpoint, of those that are wanted, that all ranks can load; ``details`` as in `run_path`.

        Raises:
            NoLoadableCheckpoint: Some exist, but each is bad for some rank, or the directory cannot be searched.
        """
        try:
            resumed = self._newest_paired(load, ranks, partial(_has_details, details))[0] if details else None
            resumed, tried = (resumed, []) if resumed else self._newest_paired(load, ranks, wanted)
        except NoLoadableCheckpoint as error:
            raise error from self._cause
        finally:
            self._client.release()
        self._report_unfinished(resumed)
        self._report(resumed)
        if resumed is None and tried:
            raise NoLoadableCheckpoint(
                coded(
                    f"{self._finder.directory} holds checkpoints, but none that all ranks can load. Tried: "
                    f"{'; '.join(tried)}. Restore one of them (what was quarantined is in .fastckpt/quarantine-*, with "
                    f"a why.txt), or, to start afresh, remove them or choose another checkpoint directory; if it is "
                    f"not shared by all nodes, share it.",
                    "FC-016",
                )
            ) from self._cause
        return resumed or ResumeResult(None, "", None, {})

    @generators_kept()
    def run_path(self, path: str, load: Load, ranks: Agreement, details: Mapping[str, Any]) -> ResumeResult:
        """Load the checkpoint at ``path``: its directory or URL, or the file of its model.

        Args:
            details: Unless empty, the newest checkpoint with these details that all ranks can load takes precedence.

        Raises:
            BadCheckpoint: Some rank cannot load it; names the rank and the reason.
        """
        # The same steps as in `run`, without a choice: all ranks load the checkpoint at the path, or none does.
        try:
            rolled_back = partial(_has_details, details)
            resumed = self._newest_paired(load, ranks, rolled_back)[0] if details else None
            if resumed is None:
                save, known, nodes = self._at(path, ranks)
                candidate, fault = self._brought(lambda: _open(known), nodes, ranks)
                state, votes = self._attempt(candidate, self._sharing([path] * len(nodes), nodes), load, ranks, fault)
                if candidate is None or any(votes):
                    raise self._bad_path(path, _objections(dict(enumerate(votes)))) from self._cause
                elsewhere = self._finder.is_elsewhere(candidate)
                resumed = ResumeResult(save, STORAGE, state, dict(candidate.details), elsewhere)
        finally:
            self._client.release()
        self._report(resumed)
        return resumed

    def _newest_paired(self, load: Load, ranks: Agreement, wanted: Wanted) -> tuple[ResumeResult | None, list[str]]:
        """`_newest` of those steps that other checkpointers of the job have, too; of all, if there is none."""

        resumed, tried = self._newest(load, ranks, Selection(wanted, self._pairing))
        if resumed is None and any(ranks.gather(bool(self._pairing.refused))):
            return self._newest(load, ranks, Selection(wanted))
        if resumed is not None and resumed.id is not None and self._place.rank == 0:
            self._pairing.report(resumed.id, self._finder.directory)
        return resumed, tried

    def _newest(self, load: Load, ranks: Agreement, select: Selection) -> tuple[ResumeResult | None, list[str]]:
        """The newest wanted checkpoint that all ranks can load; else None, and the obstacles."""
        # Every branch below depends on gathered values alone, so that all ranks take it and none waits in vain. Memory
        # is tried first where a durable tier is far: clients of stores are slow to start.
        chooser, tried = Chooser(ranks, self._place.rank), list[str]()
        bad, resumed = list[tuple[Candidate, Faults]](), None
        for look in [near, everywhere] if self._finder.has_far else [everywhere]:
            survey = look(self._finder, self._client, ranks, select)
            while resumed is None and (choices := chooser.choose(survey.has)) is not None:
                mine = choices[self._place.rank]
                candidate, fault = self._candidate(choices, survey, ranks)
                state, votes = self._attempt(candidate, self._sharing(choices, survey.nodes), load, ranks, fault)
                if candidate is None or any(votes):
                    tried += self._exclude(choices, votes, survey, chooser, bad)
                    continue
                save, tier = SaveId(mine.history, mine.step), candidate.tier.name
                passed = select.newer(survey.own.candidates, save)
                known = dict(candidate.details), False, mine.attempt, survey.holdings
                resumed = ResumeResult(save, tier, state, *known, passed)
                self._warn_of_lost_states(choices)
                self._warn_of_unheld(mine, survey)
                if self._place.group_world_size > 1:
                    # newer memory of this node, which other nodes lack: the saver gives it up
                    newer = (each for each in survey.has[self._place.rank] if each.tier == MEMORY and each.id > mine.id)
                    self._abandoned = [list(each.id) for each in sorted(newer)]
            if resumed is not None:
                break
        else:
            tried = obstacles(survey, self._finder, self._client, ranks) + tried
        self._unfinished = survey.unfinished
        damaged = [each for each in survey.own.rejected if each.kind is RejectionKind.DAMAGED]
        self._bad += map(str, damaged)
        self._finder.reject(bad, damaged, self._threads)
        return resumed, tried

    def _candidate(
        self, choices: Sequence[CheckpointLocation], survey: Survey, ranks: Agreement
    ) -> tuple[Candidate | None, Faults]:
        """Return the candidate that this rank loads, fetched from other nodes' memory if it is there; or the faults."""
        mine = choices[self._place.rank]

        def bring() -> Candidate:
            if mine.tier not in (PEER, STATELESS):
                return _open(survey.own.candidates[mine])
            with metrics.phase("resume.fetch"):
                beside = survey.is_redivided(mine)
                return self._finder.fetch(mine, survey.sources(mine), survey.own, beside=beside)

        is_stored = any(choice.tier not in (MEMORY, PEER, STATELESS) for choice in choices)
        return self._brought(bring, survey.nodes if is_stored else (), ranks, mine.tier)

    def _brought(
        self, bring: Callable[[], Candidate], nodes: Sequence[int], ranks: Agreement, tier: str = STORAGE
    ) -> tuple[Candidate | None, Faults]:
        """A candidate with its files, or why it has none; the first rank of each of the ``nodes`` is first.

        It reads the manifest for the others.
        """
        shares = len(set(nodes)) < len(nodes)
        found = self._tried(bring, tier) if self._place.local_rank == 0 or not shares else None
        if shares:
            ranks.gather(None)
        return found or self._tried(bring, tier)

    def _tried(self, bring: Callable[[], Candidate], tier: str) -> tuple[Candidate | None, Faults]:
        """A candidate, or why it cannot be brought."""
        try:
            return bring(), {}
        except (FastckptError, OSError, MemoryError) as error:
            return None, {"": self._noted(error, Phase.OPENING, tier)}

    def _exclude(
        self,
        choices: Sequence[CheckpointLocation],
        votes: Sequence[Faults],
        survey: Survey,
        chooser: Chooser,
        bad: list[tuple[Candidate, Faults]],
    ) -> list[str]:
        """Exclude checkpoints that ranks object to; returns them in words, and adds those to reject to ``bad``.

        Only damage in the bytes of files leads to a rejection. A file that does not load may be the fault of the
        script, or of a library that changed: it is skipped, and left as it is.
        """
        tried = []
        for location in sorted({choices[rank] for rank, vote in enumerate(votes) if vote}):
            of_ranks = {rank: vote for rank, vote in enumerate(votes) if choices[rank] == location}
            objections, damaged = _objections(of_ranks), _damaged(of_ranks)
            if is_unreadable([fault for vote in of_ranks.values() for fault in vote.values()]):
                # Whole, as far as known: it is tried again before anything older is chosen.
                chooser.exclude(location, f"{_named(location)} is whole and cannot be read ({objections})")
            else:
                chooser.exclude(location)
                tried.append(self._report_bad(location, objections))
                if damaged and location in survey.own.candidates:
                    bad.append((survey.own.candidates[location], damaged))
            if location in survey.own.candidates:
                survey.own.candidates[location].tier.drop(survey.own.candidates[location])
        return tried

    def _warn_of_lost_states(self, choices: Sequence[CheckpointLocation]) -> None:
        lost = [rank for rank, choice in enumerate(choices) if choice.tier == STATELESS]
        if lost and self._place.rank == 0:
            logger.warning(
                coded(
                    "step %d is resumed without the rank state of ranks %s, which no node holds any more and storage "
                    "does not have (--fast-allow-lost-rank-state): on these ranks random generators, and a position in "
                    "the data that was saved as rank_state, start as in a new job, while all else goes on from step "
                    "%d. They may read data again, or skip some",
                    "FC-019",
                ),
                choices[0].step,
                lost,
                choices[0].step,
            )

    def _warn_of_unheld(self, chosen: CheckpointLocation, survey: Survey) -> None:
        """Name the newest save that is newer than the chosen one, and of which lost nodes had files that nobody has."""
        newer = {save: ranks for save, ranks in unheld_ranks(survey.holdings).items() if save[:2] > chosen.id}
        if newer and self._place.rank == 0:
            text = (
                "%s is in memory, and not resumed: no node that is left has files of ranks %s, or whole parity of them"
            )
            logger.warning(text, SaveId(*max(newer)[:2]), newer[max(newer)])

    def _sharing(self, choices: Sequence[object], nodes: Sequence[int]) -> list[int]:
        """The ranks that read the same files as this one; if these may be downloaded, those of its node."""
        rank = self._place.rank
        same = [each for each, choice in enumerate(choices) if choice == choices[rank]]
        return [each for each in same if nodes[each] == nodes[rank] or not self._finder.has_far]

    def _at(self, path: str, ranks: Agreement) -> tuple[SaveId | None, Candidate, list[int]]:
        """Return the save that the first rank finds at a path, the same for all, and the node of each rank."""

        def look(nodes: list[int]) -> list[Any]:
            try:
                return [self._finder.look_at(path), nodes]
            except (FastckptError, OSError) as failure:
                raise self._bad_path(path, f"rank 0: {type(failure).__name__}: {failure}") from failure

        found, nodes = ranks.decide(self._place.group_rank, look)
        return *self._finder.at(found), nodes

    def _bad_path(self, path: str, why: str) -> BadCheckpoint:
        there = f"fastckpt ls {self._finder.directory} shows what there is"
        return BadCheckpoint(f"{path} cannot be loaded: {why}. {there}")

    def _attempt(
        self,
        candidate: Candidate | None,
        sharing: list[int],
        load: Load,
        ranks: Agreement,
        fault: Faults = MappingProxyType({}),  # type: ignore[assignment]
    ) -> tuple[Any, list[Faults]]:
        """Verify, vote, load, vote: a state, and the objections of each rank, by file; "" stands for the whole.

        No rank unpickles a file that another has found damaged: that can end the process.
        """
        names = self._answers_for(candidate.files, self._place.rank, sharing) if candidate else ()
        with metrics.phase("resume.verify"):
            votes = _votes(ranks, self._checked(candidate, names) if candidate else fault)
        if candidate is None or any(votes):
            return None, votes
        state, objection = None, {}
        with metrics.phase("resume.load"):
            try:
                state = load(candidate.files)
            except LOAD_ERRORS as error:
                objection = {"": self._noted(error, Phase.UNPICKLING, candidate.tier.name)}
        self._client.release()  # the state is in memory of its own: slots may change while slower ranks still load
        return state, _votes(ranks, objection)

    def _checked(self, candidate: Candidate, names: Sequence[str]) -> Faults:
        try:
            return candidate.faults(list(names), self._threads)
        except (RuntimeError, MemoryError) as error:  # of the threads that were to read
            return {"": self._noted(error, Phase.READING, candidate.tier.name)}

    def _noted(self, error: BaseException, phase: Phase, tier: str) -> Fault:
        """The fault of an error, which is the cause of the exception if nothing else can be loaded."""
        # Frames, and their garbage, would keep a half of a state: the next attempt needs the memory.
        clear_frames(error.__traceback__)
        gc.collect()
        self._cause = error
        return Fault.of(error, phase, tier)

    def _report_unfinished(self, resumed: ResumeResult | None) -> None:
        """Log unfinished checkpoints on storage that are newer than the resumed one; the first rank knows of them."""
        save = resumed.id if resumed else None
        for each in self._unfinished:
            if isinstance(each.place, SaveId) and (save is None or each.place > save):
                instead = f"{save} is resumed" if save else "nothing older is there"
                hint = "A node that did write its part wrote it elsewhere: see that all nodes share the directory."
                text = coded("%s on storage is not resumed: %s; %s. %s", "FC-017")
                logger.warning(text, each.place, each.why, instead, hint)
                self._bad.append(str(each))

    def _report(self, resumed: ResumeResult | None) -> None:
        """Report the resume to the saver, for its summary at the end of the job; one rank of each node does."""
        if self._place.local_rank == 0:
            try:
                self._client.report_resumed(resumed.tier if resumed else "", self._bad[:REPORTED], self._abandoned)
            except FastckptError as error:
                logger.warning("could not report the resume to the saver: %s", error)

    def _report_bad(self, bad: CheckpointLocation, objections: str) -> str:
        """Log and count the objections of ranks to a checkpoint; returns them in words."""
        text = f"{_named(bad)} ({objections})"
        metrics.counts["bad_checkpoints"] += 1
        self._bad.append(text)
        if self._place.rank == 0:
            logger.warning(coded("not resumed from %s", "FC-017"), text)
            history, step, tier, *_ = bad
            metrics.event("bad_checkpoint", history=history, step=step, tier=tier, reason=objections)
        return text


def _open(candidate: Candidate) -> Candidate:
    return candidate.tier.open(candidate)


def _named(location: CheckpointLocation) -> str:
    return f"step {location.step} of history {location.history} in {location.where}"


def _objections(votes: Mapping[int, Faults]) -> str:
    found = [f"rank {rank}: {fault.why}" for rank, vote in votes.items() for fault in vote.values()]
    return "; ".join(dict.fromkeys(found))


def _damaged(votes: Mapping[int, Faults]) -> Faults:
    """The files that ranks found damaged."""
    return {name: fault for vote in votes.values() for name, fault in vote.items() if name and fault.is_damage}


def _votes(ranks: Agreement, own: Faults) -> list[Faults]:
    """The faults that each rank has found."""
    votes = ranks.gather(own)
    return [{name: Fault(*fault) for name, fault in vote.items()} for vote in votes]


def _has_details(details: Mapping[str, Any], _: CheckpointLocation, candidate: Candidate) -> bool:
    return all(candidate.details.get(key) == details[key] for key in details)
