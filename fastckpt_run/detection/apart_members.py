"""Members that are apart: they answer probes, and send nothing over a lasting connection."""

import time
from collections.abc import Collection

LASTS = 10.0
"""Seconds without a message from a member that answers, after which the two are apart."""


class ApartMembers:
    """The members that send nothing to this one, though they answer it or others.

    Attributes:
        now: Members that are apart.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.now: set[str] = set()

    def keep(self, members: Collection[str]) -> list[str]:
        """Forget all but these; returns members that were apart until now."""
        forgotten = sorted(self.now.difference(members))
        self._since = {member: since for member, since in self._since.items() if member in members}
        self.now.intersection_update(members)
        return forgotten

    def is_unheard(self, member: str) -> bool:
        """Return whether nothing has come from a member since it answered."""
        return member in self._since

    def answers(self, member: str, heard: float) -> bool:
        """Note that a member answers, with its last message at ``heard``; return whether it is apart from now on."""
        now = time.monotonic()
        is_apart = now - self._since.setdefault(member, min(now, heard)) > LASTS
        is_new = is_apart and member not in self.now
        self.now |= {member} if is_apart else set()
        return is_new

    def hears(self, member: str) -> bool:
        """Note that something has come from a member; whether it was apart until now."""
        self._since.pop(member, None)
        was_apart = member in self.now
        self.now.discard(member)
        return was_apart
