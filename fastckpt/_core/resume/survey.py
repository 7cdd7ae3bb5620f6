"""Surveys the checkpoints that all ranks of a job find, and chooses the one to resume."""

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.client.save_results import TO_DISK
from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import SaveId
from fastckpt._core.io.read_errors import ReadVerdict, worst
from fastckpt._core.memory.census import ArenaState, census
from fastckpt._core.policy.peer_sources import NodeHolding, reachable, sources, with_rebuilt
from fastckpt._core.policy.resume import PEER, STATELESS, CheckpointLocation, choose
from fastckpt._core.resume.candidates import CandidateFinder
from fastckpt._core.resume.companions import Selection, search_companions
from fastckpt._core.resume.tiers import Fault, Listing, Rejected, RejectionKind
from fastckpt.errors import FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")

LIMIT = 45.0
"""Seconds for which a checkpoint that cannot be read is tried again; an attempt that takes longer is the only one."""
PAUSE = 3.0
"""Seconds between two attempts."""
DEADLINE = 600.0
"""Seconds that storage may take to receive the checkpoint that all nodes have in memory."""
GONE_DEADLINE = 60.0
"""The same if nodes that are gone had parts of it that no memory has: they have written these by then, or never do."""
COPIED_DEADLINE = 3.0
"""The same if all nodes can resume an older save from memory: a longer wait would cost more than its steps."""
GIVEN_UP = "given up"
LONGEST_PAUSE = 0.5
"""Seconds between two questions for the durable checkpoints, at most."""


@dataclass(frozen=True)
class Survey:
    """The candidates that all ranks have reported.

    Attributes:
        own: The listing of this rank.
        has: The checkpoints that each rank could load.
        nodes: The node of each rank.
        unfinished: Checkpoints that nodes were writing, newer than all that count on storage; in the first rank.
        unsearched: Reason why the checkpoint directory could not be searched; empty if it could.
        holdings: Holdings of all nodes in memory, of saves of several nodes.
        shards: The files that each rank needs of a state that is divided among as many ranks; empty if it is not.
    """

    own: Listing
    has: list[set[CheckpointLocation]]
    nodes: list[int]
    unfinished: Sequence[Rejected] = ()
    unsearched: str = ""
    holdings: Sequence[NodeHolding] = ()

    shards: Sequence[Sequence[str]] = ()

    def sources(self, location: CheckpointLocation) -> dict[str, list[str]]:
        """The addresses of agents that hold each file that a node lacks of a save that it is to fetch."""
        return sources(self.holdings, self.nodes, location, self.shards)

    def is_redivided(self, location: CheckpointLocation) -> bool:
        """Return whether a state is divided among ranks, and another number of ranks saved it."""
        count = len(self.nodes)
        return bool(self.shards) and any(h.save == location.save and h.world_size != count for h in self.holdings)


def _report(finder: CandidateFinder, client: SaverClient, listing: Listing, select: Selection, last: Any) -> list[Any]:
    """The report of this rank on the saves that it could load, with something ``last``."""
    held = [each.to_json() for each in finder.holdings(listing, select)]
    return [select(listing.candidates), client.place.group_rank, held, finder.needs.divided, last]


def _survey(finder: CandidateFinder, own: Listing, reports: Sequence[Sequence[Any]], **more: Any) -> Survey:
    """A survey of the reports of all ranks."""
    nodes = [node for _, node, *_ in reports]
    holdings = with_rebuilt([NodeHolding.from_json(each) for _, _, held, *_ in reports for each in held])
    needs, shards = finder.needs, [names for *_, names, _ in reports] if finder.needs.shards else ()
    allowed = {"may_redivide": needs.may_redivide, "allow_lost": needs.allow_lost}
    fetched = reachable(holdings, nodes, needs.main, shards, **allowed)
    has = [{CheckpointLocation(*each) for each in found} for found, *_ in reports]
    has = [a | b for a, b in zip(has, fetched, strict=True)]
    return Survey(own, has, nodes, holdings=holdings, shards=shards, **more)


def near(finder: CandidateFinder, client: SaverClient, ranks: Agreement, select: Selection) -> Survey:
    """Survey memory for checkpoints as new as all that is durable: storage is not needed."""
    own, durable = Listing(), tuple[int, ...]()
    try:
        own, durable = finder.find_near(), client.durable
    except (FastckptError, OSError) as failure:
        logger.debug("memory could not be read, and is read again: %s", failure)
    if select.pairing is not None:
        asked = sorted(select.companions(own.candidates))
        select.know(ranks.decide(asked, lambda values: search_companions({name for each in values for name in each})))
    reports = ranks.gather(_report(finder, client, own, select, durable))
    least = max(tuple(durable) for *_, durable in reports)
    found = _survey(finder, own, reports)
    return replace(found, has=[{at for at in each if at.id >= least} for each in found.has])


def everywhere(finder: CandidateFinder, client: SaverClient, ranks: Agreement, select: Selection) -> Survey:
    """Survey all tiers; publishes first, if need be, the checkpoints of which nodes have written all parts.

    Raises NoLoadableCheckpoint if storage cannot be searched, unless memory has a checkpoint that is as new.
    """
    # 1. each rank lists memory   2. the first rank searches storage, for all   3. each selects saves that it could load
    unfinished: list[Rejected] = []

    def search(asked: list[Any]) -> Any:
        try:
            found, lacking = finder.search([own for own, _ in asked])
        except (FastckptError, OSError) as failure:  # the others must not wait for this rank in vain
            return {"error": f"rank 0: {type(failure).__name__}: {failure}"}
        unfinished.extend(lacking)
        stored = finder.find(here, found).candidates
        companions = {name for _, names in asked for name in names} | select.companions(stored)
        return found | {"companions": search_companions(companions)}

    here, error = Listing(), ""
    try:
        here = finder.in_memory()
    except (FastckptError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    found = ranks.decide([finder.needs.own, sorted(select.companions(here.candidates))], search)
    errors = [found["error"]] if "error" in found else []
    if not errors:
        select.know(found["companions"])
        own = finder.find(here, found)
        reports = ranks.gather(_report(finder, client, own, select, error))
        errors = [f"rank {rank}: {error}" for rank, (*_, error) in enumerate(reports) if error]
    if errors:
        text = f"{finder.directory} cannot be searched for checkpoints: {'; '.join(errors)}"
        in_memory = near(finder, client, ranks, select)
        if choose(in_memory.has, ()) is None:
            raise NoLoadableCheckpoint(coded(text, "FC-020"))
        logger.warning("%s. The checkpoint in memory is as new or newer, so storage is not needed.", text)
        return replace(in_memory, unsearched=text)
    return _survey(finder, own, reports, unfinished=unfinished)


def obstacles(survey: Survey, finder: CandidateFinder, client: SaverClient, ranks: Agreement) -> list[str]:
    """Checkpoints that exist and are no candidates for all ranks, in words; all ranks call it when none was resumed."""
    own = [str(each) for each in survey.own.rejected if each.kind is not RejectionKind.UNFINISHED] + client.lost
    if client.place.local_rank == 0:
        own += held_elsewhere(client.arena, finder.directory)
    found = [survey.unsearched] if survey.unsearched else []
    found += _without_rank_states(survey, finder)
    for each in sorted({location for report in survey.has for location in report}):
        lacking = [rank for rank, report in enumerate(survey.has) if each not in report]
        if lacking:
            found.append(f"step {each.step} in {each.where} (not there for ranks {lacking})")
    return found + sorted({text for report in ranks.gather(own) for text in report})


def _without_rank_states(survey: Survey, finder: CandidateFinder) -> list[str]:
    """The newest save in memory that lacks the states of some ranks alone, in words; [] if there is none."""
    if finder.needs.shards:
        return []
    main = finder.needs.main
    fetched = reachable(survey.holdings, survey.nodes, main, allow_lost=True)
    # By save: in which tier each rank would have it.
    tiers = [{each.save: each.tier for each in (*more, *has)} for has, more in zip(survey.has, fetched, strict=True)]
    if not (saves := set.intersection(*({*each} for each in tiers))):
        return []
    save = max(saves)
    lost = [rank for rank, each in enumerate(tiers) if each[save] == STATELESS]
    remedy = "--fast-allow-lost-rank-state resumes it without"
    return [f"step {save[1]} in memory lacks only the states of ranks {lost}, which no node holds: {remedy}"] * bool(
        lost
    )


def held_elsewhere(arena: Path, directory: str) -> list[str]:
    """Checkpoints in arenas of this host that this node, or one that has ended, filled under another node rank.

    Args:
        arena: The arena of this node now.
        directory: The checkpoint directory.
    """
    with suppress(OSError):
        entries = {entry.path: entry for entry in census(arena.parent) if entry.directory == directory}
        if (ours := entries.pop(arena, None)) is not None:
            theirs = [each for each in entries.values() if each.claim.is_of(ours.claim.seen, ours.claim.inode)]
            return [
                f"{each.newest} in {each.path} (in memory of this host, which was another node's)"
                for each in theirs
                if each.newest and (each.state is ArenaState.LEFT_BEHIND or each.owner == ours.owner)
            ]
    return []


def is_unreadable(faults: Collection[Fault]) -> bool:
    """Return whether faults prove nothing about a checkpoint: lack of memory, of descriptors, of an answer."""
    return bool(faults) and worst(ReadVerdict(each.verdict) for each in faults) is ReadVerdict.NO_ANSWER


class Chooser:
    """Chooses the next checkpoint to try, as `policy.resume.choose`; equal in all ranks.

    A checkpoint that is whole and cannot be read now is tried again for a while before an older one is chosen.

    Attributes:
        excluded: Checkpoints that some rank has tried and found bad.
    """

    def __init__(self, ranks: Agreement, rank: int) -> None:
        self.excluded: set[CheckpointLocation] = set()
        self._ranks, self._rank = ranks, rank
        self._unreadable: dict[CheckpointLocation, str] = {}
        self._end: float | None = None

    def exclude(self, location: CheckpointLocation, unreadable: str = "") -> None:
        """Do not choose this one again: it is bad, or ``unreadable`` now, for the reason given."""
        self.excluded.add(location)
        if unreadable:
            self._unreadable[location] = unreadable
        if unreadable and self._end is None:
            self._end = time.monotonic() + LIMIT
            if self._rank == 0:
                logger.warning(coded("%s. It is tried again for up to %.0f s", "FC-020"), unreadable, LIMIT)

    def choose(self, has: Sequence[Collection[CheckpointLocation]]) -> tuple[CheckpointLocation, ...] | None:
        """The newest save that every rank can load, as the nearest place where each has it; None if there is none.

        Raises NoLoadableCheckpoint once a newer one was unreadable for long enough.
        """
        while self._has_newer(choices := choose(has, self.excluded)):
            self._wait()
            self.excluded -= self._unreadable.keys()
            self._unreadable.clear()
        return choices

    def _has_newer(self, choices: Sequence[CheckpointLocation] | None) -> bool:
        newest = max((location.id for location in self._unreadable), default=None)
        return newest is not None and (choices is None or choices[0].id < newest)

    def _wait(self) -> None:
        assert self._end is not None
        # Clocks differ: the ranks give up together, when the first of them would.
        if any(self._ranks.gather(time.monotonic() + PAUSE > self._end)):
            raise NoLoadableCheckpoint(
                coded(
                    f"{'; '.join(self._unreadable.values())}. No older checkpoint is loaded in its place: all that is "
                    "saved from then on would outrank this one. Start the job again when it can be read; or load "
                    "another one by its path; or, to give this one up for good, remove it.",
                    "FC-020",
                )
            )
        time.sleep(PAUSE)


def join_on_storage(finder: CandidateFinder, client: SaverClient, ranks: Agreement) -> None:
    """Return when storage has the newest save of which each node has its part, unless memory is enough for all ranks.

    Each agent flushes the newest save of its own node, which may be newer than those of the others, or not done yet.
    If storage is in trouble, this does not wait.
    """
    # 1. find the newest save that all nodes have in memory   2. ask each saver to persist it
    # 3. wait, all ranks in step, until every node sees it durable or one has given up
    listing = finder.in_memory()
    held = [[*location.id, location.attempt, is_enough] for location, is_enough in finder.held(listing).items()]
    reports = ranks.gather(_report(finder, client, listing, Selection(lambda *_: True), [held, client.durable]))
    survey, states = _survey(finder, listing, reports), [last for *_, last in reports]
    common = set.intersection(*({tuple(save[:3]) for save in report} for report, _ in states))
    newest, durable = max(common, default=None), max(tuple(each) for _, each in states)
    if newest is None or newest[:2] <= durable or all([*newest, True] in report for report, _ in states):
        return
    if all(any(at.save == newest and at.tier == PEER for at in has) for has in survey.has):
        return
    save = SaveId(*newest[:2])
    if client.place.local_rank == 0:
        logger.info("persisting %s, which is in the memory of all nodes, to resume it from storage", save)
        with suppress(FastckptError):
            client.committed(save, TO_DISK)
    end, pause = time.monotonic() + _patience(finder, survey, newest, durable), 0.02
    while any(states := ranks.gather(_missing(save, client, end))) and GIVEN_UP not in states:
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _patience(finder: CandidateFinder, survey: Survey, save: tuple[int, int, str], durable: tuple[int, ...]) -> float:
    """Seconds for which a save is worth waiting for."""
    if not finder.needs.from_peers or _has_all_parts(survey.holdings, save):
        return DEADLINE
    copied = choose(survey.has, ())
    return COPIED_DEADLINE if copied and tuple(copied[0].id) > durable else GONE_DEADLINE


def _has_all_parts(holdings: Sequence[NodeHolding], save: tuple[int, int, str]) -> bool:
    """Return whether the memory of the nodes has the files of all ranks that saved."""
    held = [each for each in holdings if each.save == save]
    return {rank for each in held for rank in each.ranks}.issuperset(
        range(max((each.world_size for each in held), default=0))
    )


def _missing(save: SaveId, client: SaverClient, end: float) -> str:
    """The state of a persist as this node knows it; empty once the save is durable."""
    try:
        status = client.status()
    except FastckptError:
        return GIVEN_UP
    if tuple(status.newest) >= save:
        return ""
    return GIVEN_UP if status.trouble or time.monotonic() > end else "not yet"
