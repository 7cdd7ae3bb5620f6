"""The rules by which rounds of agents follow each other in one place. Pure functions: a model checks them exhaustively.

A round that has lost nodes, or a half of one, knows its agents, and finds records there. From these alone it follows
whether it may open the next history at once, and whether its saves still count.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.storage.history import Record

MINORITY_WAIT = 10.0
"""Seconds that fewer than half of the last members wait before they open the next history."""
LOOKS = 64
"""Records that are read at most for a save of an earlier history."""


@dataclass(frozen=True)
class Party:
    """The agents of one round, as one of them sees it.

    Attributes:
        launch: Of this agent.
        location: The checkpoint directory of the job.
        round: Launches of all agents of the round; only this one where they do not know each other.
        first: The one that opens histories for all; empty if that is not known.
    """

    launch: str
    location: str
    round: frozenset[str] = frozenset()
    first: str = ""

    def is_of_job(self, record: Record) -> bool:
        """Return whether agents of this round were members of that history."""
        return record.location == self.location and bool(members(record) & (self.round | {self.launch}))

    def has_opened(self, record: Record, token: str = "") -> bool:
        """Return whether a history was opened by this round.

        Args:
            record: Its record.
            token: Token of this round's saves in that very history; empty if it saves in another one.
        """
        if token and record.token:
            return token == record.token
        if record.location != self.location:
            return False
        # Both halves have members of the round before: only the agent that opens for this round is of it.
        return record.launch == self.launch or (
            record.launch == self.first if self.first else self.launch in record.members
        )


def members(record: Record) -> frozenset[str]:
    """The launches of all agents of the round that has opened a history."""
    return frozenset({record.launch, *record.members} - {""})


def may_follow(party: Party, record: Record, *, has_died: bool) -> bool:
    """Return whether a round may open the next history at once, without a wait for the holder of the newest one.

    Args:
        party: The round.
        record: The newest history's.
        has_died: True if its holder is known to be dead.
    """
    return record.closed or has_died or party.is_of_job(record)


def pause_before(round: Collection[str], record: Record | None) -> float:
    """Seconds that a round waits before it opens the history after this one: the larger half comes first."""
    last = members(record) if record and not record.closed else frozenset()
    return MINORITY_WAIT if 0 < 2 * len(last & {*round}) < len(last) else 0.0


def may_report(party: Party, id: SaveId, token: str, newest: Record | None) -> bool:
    """Return whether nobody else has opened a newer history, by the records as read after a save was published.

    Args:
        party: The round that has published it.
        id: Id of the save.
        token: Of this round's saves in that history.
        newest: The newest record; None if there is none.
    """
    return newest is None or party.has_opened(newest, token if newest.history == id.history else "")


def is_of_another_line(opening: Opening, record: Record | None, newest: Callable[[], int], *, lost: bool) -> bool:
    """Return whether others have opened a history from which a save in memory does not go on.

    Args:
        opening: Of that save.
        record: That of its history; None if nobody has opened it.
        newest: Gives the number of the newest history that was opened.
        lost: True if this agent has lost the directory to others, and has saved nothing since.
    """
    if record is not None:
        return "" not in (opening.token, record.token) and record.token != opening.token
    # A half that restarts more often than the one which has the directory is at a higher number.
    if lost:
        return newest() > 0
    if not opening.members or opening.parent is None or opening.is_rollback:
        return False
    return newest() > opening.parent.history


def is_continued(id: SaveId, newest: int, read: Callable[[int], Record | None]) -> bool:
    """Return whether all newer histories go on from a save, or a later one of that line. Else it is not resumed.

    Not only the newest one: of a history between, a node that stands still may yet publish something.

    Args:
        id: The save.
        newest: The number of the newest history.
        read: Gives the record of a history.
    """
    newer = range(id.history + 1, newest + 1)
    return len(newer) <= LOOKS and all(_goes_on_from(id, read(history), read) for history in newer)


def _goes_on_from(id: SaveId, record: Record | None, read: Callable[[int], Record | None]) -> bool:
    while record is not None and record.history > id.history:
        if record.parent is None or record.parent.history <= id.history:
            return record.parent is not None and id <= record.parent
        record = read(record.parent.history)
    return True
