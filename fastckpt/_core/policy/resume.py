"""Chooses the checkpoint that a job resumes, and the tier for each rank, from those that every rank could load."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

TIERS = MEMORY, PEER, MIXED, STORAGE, REMOTE, STATELESS = (
    "memory",
    "peer",
    "mixed",
    "storage",
    "remote",
    "memory without rank state",
)
"""The tiers, nearest first. A peer is the memory of another node; a mixed checkpoint has some files in memory, and the
others on storage. The last is the memory of nodes of which none has the file of this rank: all else is nearer."""

DURABLE = STORAGE, REMOTE


class CheckpointLocation(NamedTuple):
    """A checkpoint in one place.

    Attributes:
        tier: Of `TIERS`.
        node: Node that has it in memory, of several; 0 where that makes no difference.
        attempt: A token that the ranks of all nodes share from one load to the next, as of the save; may be empty.
            Only checkpoints with the same token are the same save for certain, in any tier.
    """

    history: int
    step: int
    tier: str
    node: int = 0
    attempt: str = ""

    @property
    def id(self) -> tuple[int, int]:
        """History and step."""
        return self.history, self.step

    @property
    def where(self) -> str:
        """The tier; and the node of the memory, if several nodes saved it."""
        if self.tier == STATELESS:
            return self.tier
        if self.tier == PEER:
            return f"memory of other nodes than {self.node}"
        is_of_a_node = self.attempt and self.tier in (MEMORY, MIXED)
        return f"{self.tier} of node {self.node}" if is_of_a_node else self.tier

    @property
    def save(self) -> tuple[int, int, str]:
        """Key of the save, if it has a token; two places with the same key hold the same save."""
        return self.history, self.step, self.attempt

    @property
    def _save(self) -> tuple[int, int, str, str]:
        """A key that ranks that resume one save share: with the tier, if nothing else shows that it is one save."""
        return self.history, self.step, self.attempt, "" if self.attempt else self.tier


def choose(
    reports: Sequence[Collection[CheckpointLocation]], excluded: Collection[CheckpointLocation]
) -> tuple[CheckpointLocation, ...] | None:
    """The newest save that every rank can load, as the nearest place where each has it; None if there is none.

    Args:
        reports: The checkpoints that each rank could load.
        excluded: Checkpoints that some rank has tried and found bad.
    """
    ways = []
    for report in reports:
        # Sorted first, so that ties are decided alike on every rank, whatever the order of the report.
        usable = sorted(candidate for candidate in report if candidate not in excluded)
        # Sorted by nearness, so that of one save in several tiers the nearest overwrites the others in the dict.
        ways.append({candidate._save: candidate for candidate in sorted(usable, key=_nearness)})
    # 1. per rank: the nearest place of each save   2. the saves that every rank has   3. of these the newest, then the
    # one with the nearest places; all ranks compute the same, from the same reports
    common = set.intersection(*(set(way) for way in ways)) if ways else set()
    plans = [tuple(way[save] for way in ways) for save in common]
    return max(plans, key=lambda plan: (plan[0].id, sum(map(_nearness, plan)), plan[0].attempt), default=None)


def _nearness(candidate: CheckpointLocation) -> int:
    return -TIERS.index(candidate.tier)
