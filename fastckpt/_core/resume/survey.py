"""What all ranks of a job see when they look for a checkpoint to resume."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fastckpt._core.client.collective import Agreement
from fastckpt._core.client.connection import SaverClient
from fastckpt._core.policy.resume import CheckpointLocation, choose
from fastckpt._core.resume.candidates import OTHER_KIND, Candidate, CandidateFinder
from fastckpt._core.resume.memory_of_other_ranks import held_elsewhere
from fastckpt.errors import FastckptError, NoLoadableCheckpoint

logger = logging.getLogger("fastckpt")

Wanted = Callable[[CheckpointLocation, Candidate], bool]
"""Whether a checkpoint may be the one to resume."""


@dataclass(frozen=True)
class Survey:
    """What the ranks see.

    Attributes:
        offers: What this rank could load.
        has: What each rank could.
        nodes: On which node each rank is.
        others: What else exists, in words.
    """

    offers: dict[CheckpointLocation, Candidate]
    has: list[set[CheckpointLocation]]
    nodes: list[int]
    others: list[str]


def near(offers: CandidateFinder, link: SaverClient, agreement: Agreement, wanted: Wanted) -> Survey:
    """What memory holds, and is as new as all that is durable: storage is not needed."""
    found, durable = dict[CheckpointLocation, Candidate](), tuple[int, ...]()
    try:
        found, durable = offers.near()
    except (FastckptError, OSError) as failure:
        logger.debug("what is in memory is looked for again: %s", failure)
    said = {"has": _of(found, wanted), "node": link.place.group_rank, "durable": durable}
    reports = agreement.gather(said)
    least = max(tuple(report["durable"]) for report in reports)
    has = [{c for entry in report["has"] if (c := CheckpointLocation(*entry)).id >= least} for report in reports]
    return Survey(found, has, [report["node"] for report in reports], [])


def everywhere(
    offers: CandidateFinder, link: SaverClient, agreement: Agreement, wanted: Wanted, *, settle: bool = True
) -> Survey:
    """What there is, in memory and on storage; what nodes have written there whole is first published, if need be.

    Raises NoLoadableCheckpoint if some rank cannot look for it, unless memory holds what is as new.
    """
    found, error = dict[CheckpointLocation, Candidate](), ""
    try:
        found = offers.find()
    except (FastckptError, OSError) as failure:  # the others must not wait for this rank in vain
        error = f"{type(failure).__name__}: {failure}"
    bad = [f"{path}: {why}" for _, path, why in offers.damaged]
    bad += [f"{path}, set aside before: {why}" for path, why in offers.quarantined]
    bad += link.lost + offers.partial
    if link.place.local_rank == 0:
        bad += held_elsewhere(link.arena, offers.directory)
    bad += [f"{path} {OTHER_KIND}" for path in offers.other]
    published = settle and link.place.rank == 0 and offers.settle()
    said = {"has": _of(found, wanted), "node": link.place.group_rank, "bad": bad, "error": error}
    reports = agreement.gather(said | {"published": published})
    if any(report["published"] for report in reports):
        return everywhere(offers, link, agreement, wanted, settle=False)  # now all can see it
    if errors := [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]:
        text = f"{offers.directory} cannot be searched for checkpoints: {'; '.join(errors)}"
        in_memory = near(offers, link, agreement, wanted)
        if choose(in_memory.has, ()) is None:
            raise NoLoadableCheckpoint(text)
        logger.warning("%s. What memory holds is newer, or as new.", text)
        return replace(in_memory, others=[text])
    has = [{CheckpointLocation(*entry) for entry in report["has"]} for report in reports]
    others = _not_for_all(has) + sorted({text for report in reports for text in report["bad"]})
    return Survey(found, has, [report["node"] for report in reports], others)


def _of(offers: Mapping[CheckpointLocation, Candidate], wanted: Wanted) -> list[CheckpointLocation]:
    return [candidate for candidate, offer in offers.items() if wanted(candidate, offer)]


def _not_for_all(has: list[set[CheckpointLocation]]) -> list[str]:
    everywhere = set[CheckpointLocation].intersection(*has)
    found = []
    for candidate in sorted(set[CheckpointLocation].union(*has) - everywhere):
        lacking = [rank for rank, report in enumerate(has) if candidate not in report]
        found.append(f"step {candidate.step} in {candidate.where} (not there for ranks {lacking})")
    return found
