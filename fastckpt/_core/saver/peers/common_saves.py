"""The newest save that all nodes hold: each agent reports its saves to the first one, which answers with that.

From one such save to the next it goes in two steps, as a commit in two phases does (Gray, Notes on Data Base Operating
Systems, 1978). The next one counts when every node has reported that it keeps it. Until then every node keeps the one
before, too. With one step, a node could overwrite a save that another has just come to rely on.

Between both steps each node has its partners keep files of which it has the only copy (`replication`). So copies are
made of one save that all nodes turn to; a save that was overtaken before is never copied.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, TypeVar

from fastckpt._core.format.ids import SaveId
from fastckpt._core.ipc.sealed import reading
from fastckpt._core.policy.replicas.margins import NodeMargin, smallest
from fastckpt.errors import ProtocolError

T = TypeVar("T")
EACH = 10
"""Common saves from one comparison of files to the next."""
SHORTEST_WAIT, LONGEST_WAIT = 0.2, 10.0
"""Seconds that a report waits for another answer than the one that its agent knows."""
EACH_WAIT = 0.004
"""Seconds of that for each agent: a report takes 0.2 to 0.5 ms of the first one's time, and is sent twice a save.

If that takes longer than the wait, agents send theirs again and again: of 1,024 with 0.2 s, each sent 7 for a save.
"""


@dataclass(frozen=True)
class HeldReport:
    """Report of one agent on the saves of one directory that it holds.

    Attributes:
        member: The agent.
        saves: The saves of which it has all of its ranks' files in memory, and others keep those that are small.
        keeping: The next common save, if the agent knows of one, holds it and keeps it; None else.
        copied: True if the large files of that one, of which this node has the only copy, are with its partners, too.
        compared: A save, and the digests of those of its files that each node has of its own.
        copies: Copies of these large files that others keep.
        large: Bytes of these files.
    """

    member: str
    saves: frozenset[SaveId]
    keeping: SaveId | None = None
    copied: bool = False
    compared: SaveId | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    copies: int = 0
    large: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a part of a message."""
        compared = list(self.compared) if self.compared else []
        saves, keeping = [list(save) for save in sorted(self.saves)], list(self.keeping or ())
        return {
            "member": self.member,
            "saves": saves,
            "keeping": keeping,
            "copied": self.copied,
            "compared": compared,
            "digests": dict(self.digests),
            "copies": self.copies,
            "large": self.large,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "HeldReport":
        """The report in a message; raises ProtocolError."""
        with reading("the report of what an agent holds"):
            saves = frozenset(SaveId(int(history), int(step)) for history, step in record["saves"])
            keeping, compared = (_id(record[name]) for name in ("keeping", "compared"))
            digests = {str(name): str(digest) for name, digest in record["digests"].items()}
            counts = int(record["copies"]), int(record["large"])
            return cls(str(record["member"]), saves, keeping, bool(record["copied"]), compared, digests, *counts)


@dataclass(frozen=True)
class CommonSave:
    """The answer to a report.

    Attributes:
        id: The newest save that all nodes hold and keep; None if there is none.
        next: The one that is to be it next, which every node has to keep, too; None for none.
        compare: The save of which every agent is to digest the files, so that they can be compared; None for none.
        alike: Whether the files that each node has of its own were equal when they were last compared; None if they
            were not in this round.
        is_replicated: True if no node has the only copy of a file of that newest save.
    """

    id: SaveId | None = None
    next: SaveId | None = None
    compare: SaveId | None = None
    alike: bool | None = None
    is_replicated: bool = False

    def is_behind(self, aim: SaveId | None) -> bool:
        """Return whether this is older than a save that one agent holds, and that all may hold soon."""
        return aim is not None and (self.id is None or self.id < aim)

    def to_json(self) -> dict[str, Any]:
        """Return a message."""
        ids = {"common": self.id, "next": self.next, "compare": self.compare}
        found = {name: list(id or ()) for name, id in ids.items()}
        return {**found, "alike": self.alike, "replicated": self.is_replicated}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CommonSave":
        """The answer in a message; raises ProtocolError."""
        with reading("the answer to a report"):
            alike = record["alike"]
            id, next, compare = (_id(record[name]) for name in ("common", "next", "compare"))
            return cls(id, next, compare, alike if alike is None else bool(alike), bool(record["replicated"]))


class CommonSaves:
    """Saves of one directory that all agents of a round hold; each agent reports to it, in threads of any number.

    The time of a report does not grow with the number of agents, but for the report that completes a step.

    Args:
        members: The agents of the round, by their ranks.
    """

    def __init__(self, members: Collection[str]) -> None:
        self._order, self._members = [*members], frozenset(members)
        self._held: dict[str, frozenset[SaveId]] = {}
        self._holders = Counter[SaveId]()
        self._keeping: dict[str, SaveId | None] = {}
        self._keepers = Counter[SaveId | None]()
        self._copied: dict[str, bool] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._margins: Sequence[NodeMargin] = ()
        self._is_replicated = False
        self._digests: dict[str, Mapping[str, str]] = {}
        self._id: SaveId | None = None
        self._next: SaveId | None = None
        self._compare: SaveId | None = None
        self._since_compared = 0
        self._alike: bool | None = None
        self._changed = Condition()

    def report(self, report: HeldReport, known: CommonSave | None = None, wait: float = 0.0) -> CommonSave:
        """Note the saves that an agent holds; raises ProtocolError if it is not of this round.

        Args:
            report: Its report.
            known: The answer that it has.
            wait: Seconds to wait for another save, at most.
        """
        if report.member not in self._members:
            raise ProtocolError("the agent is not in this round, or not yet")
        with self._changed:
            self._take(report)
            if self._compare is not None and report.compared == self._compare:
                self._digests[report.member] = report.digests
            # A comparison first: the save that is compared stays the common one until all have digested it.
            before = self._answer
            self._judge()
            self._advance()
            if self._answer != before:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer != known, wait)
            return self._answer

    def smallest_margin(self) -> tuple[SaveId, NodeMargin] | None:
        """The newest save that all nodes hold, and the node whose loss leaves the fewest copies of its large files.

        None if there is no such save, or no node has large files of its own.
        """
        with self._changed:
            margin = smallest(self._margins)
            return (self._id, margin) if self._id is not None and margin is not None else None

    @property
    def longest_wait(self) -> float:
        """Seconds that a report may wait for another answer."""
        return min(max(SHORTEST_WAIT, EACH_WAIT * len(self._members)), LONGEST_WAIT)

    @property
    def _answer(self) -> CommonSave:
        return CommonSave(self._id, self._next, self._compare, self._alike, self._is_replicated)

    def _take(self, report: HeldReport) -> None:
        member = report.member
        _recount(self._holders, report.saves, self._held.get(member, frozenset()))
        _recount(self._keepers, [report.keeping], [self._keeping[member]] if member in self._keeping else [])
        self._held[member], self._keeping[member], self._copied[member] = report.saves, report.keeping, report.copied
        self._counts[member] = report.copies, report.large

    def _judge(self) -> None:
        if self._compare is None:
            return
        if len(self._digests) == len(self._members):
            digests = [*self._digests.values()]
            self._alike = all(each == digests[0] for each in digests)
            self._compare = None
        elif self._holders[self._compare] < len(self._held):
            self._compare = None  # somebody has given it up

    def _advance(self) -> None:
        if self._next is not None and self._keepers[self._next] == len(self._members):
            self._id, self._next = self._next, None
            self._is_replicated = all(self._copied.values())
            self._margins = [NodeMargin(rank, *self._counts[member]) for rank, member in enumerate(self._order)]
            self._since_compared += 1
            if not self._alike or self._since_compared >= EACH:
                self._compare, self._digests, self._since_compared = self._id, {}, 0
        if len(self._held) < len(self._members) or self._compare is not None:
            return
        both = {save for save, count in self._holders.items() if count == len(self._members)}
        if self._next is None or self._next not in both:
            newer = [save for save in both if self._id is None or save > self._id]
            self._next = max(newer, default=None)


def _recount(counts: "Counter[T]", new: Collection[T], old: Collection[T]) -> None:
    """Count the new ones, and the old ones no more."""
    counts.update(new)
    counts.subtract(old)
    for each in old:
        if not counts[each]:
            del counts[each]


def _id(values: Sequence[Any]) -> SaveId | None:
    return SaveId(*map(int, values)) if values else None
