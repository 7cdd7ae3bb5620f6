"""Which checkpoint a job resumes: a pure function of what every rank could load."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

TIERS = ("memory", "storage", "remote")
"""Nearest first."""


class Candidate(NamedTuple):
    """A checkpoint in one tier."""

    history: int
    step: int
    tier: str

    @property
    def id(self) -> tuple[int, int]:
        """History and step."""
        return self.history, self.step


def choose(reports: Sequence[Collection[Candidate]], excluded: Collection[Candidate]) -> Candidate | None:
    """The newest checkpoint that every rank can load, from its nearest tier; None if there is none.

    Args:
        reports: What each rank could load.
        excluded: What some rank has tried and found bad.
    """
    common = set.intersection(*(set(report) for report in reports)) if reports else set()
    usable = [candidate for candidate in common if candidate not in excluded]
    return max(usable, key=lambda candidate: (candidate.id, -TIERS.index(candidate.tier)), default=None)
