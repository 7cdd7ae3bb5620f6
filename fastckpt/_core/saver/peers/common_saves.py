"""The newest save that all nodes hold: one agent, the first's, learns what each holds, and answers with that."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from fastckpt._core.format.ids import SaveId
from fastckpt.errors import ProtocolError

EACH = 10
"""Common saves from one whose files are compared to the next."""


@dataclass(frozen=True)
class HeldReport:
    """What one agent holds of one directory.

    Attributes:
        member: The agent.
        saves: The saves of which it has all of its ranks' files in memory, and others keep those that are small.
        compared: A save, and the digests of those of its files that each node has of its own.
    """

    member: str
    saves: frozenset[SaveId]
    compared: SaveId | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a part of a message."""
        compared = list(self.compared) if self.compared else []
        saves = [list(save) for save in sorted(self.saves)]
        return {"member": self.member, "saves": saves, "compared": compared, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "HeldReport":
        """The report in a message; raises ProtocolError."""
        try:
            saves = frozenset(SaveId(int(history), int(step)) for history, step in record["saves"])
            compared = SaveId(*map(int, record["compared"])) if record["compared"] else None
            return cls(str(record["member"]), saves, compared, {str(n): str(d) for n, d in record["digests"].items()})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"this is no report of what an agent holds: {error}") from error


@dataclass(frozen=True)
class CommonSave:
    """The answer to a report.

    Attributes:
        id: The newest save that all nodes hold; None if there is none.
        compare: The save whose files every agent is to digest, so that they can be compared; None for none.
        alike: Whether the files that each node has of its own were equal when they were last compared; None if they
            were not in this round.
    """

    id: SaveId | None = None
    compare: SaveId | None = None
    alike: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        return {"common": list(self.id or ()), "compare": list(self.compare or ()), "alike": self.alike}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CommonSave":
        """The answer in a message; raises ProtocolError."""
        try:
            id, compare = (SaveId(*map(int, record[n])) if record[n] else None for n in ("common", "compare"))
            return cls(id, compare, record["alike"] if record["alike"] is None else bool(record["alike"]))
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"this is no answer to a report: {error}") from error


class CommonSaves:
    """What all agents of a round hold of one directory; each reports to it, in threads of any number.

    Args:
        members: The agents of the round.
    """

    def __init__(self, members: Collection[str]) -> None:
        self._members = frozenset(members)
        self._held: dict[str, frozenset[SaveId]] = {}
        self._digests: dict[str, Mapping[str, str]] = {}
        self._compare: SaveId | None = None
        self._seen: list[SaveId] = []
        self._alike: bool | None = None
        self._lock = Lock()

    def report(self, report: HeldReport) -> CommonSave:
        """Take note of what an agent holds; raises ProtocolError if it is none of this round."""
        if report.member not in self._members:
            raise ProtocolError("the agent is not in this round, or not yet")
        with self._lock:
            self._held[report.member] = report.saves
            newest = self._newest()
            if report.compared is not None and report.compared == self._compare:
                self._digests[report.member] = report.digests
                self._judge(list(self._digests.values()))
            self._next_comparison(newest)
            return CommonSave(newest, self._compare, self._alike)

    def _newest(self) -> SaveId | None:
        if self._held.keys() != self._members:
            return None
        return max(frozenset.intersection(*self._held.values()), default=None)

    def _judge(self, digests: Sequence[Mapping[str, str]]) -> None:
        if len(digests) == len(self._members):
            self._alike = all(each == digests[0] for each in digests)
            self._compare = None

    def _next_comparison(self, newest: SaveId | None) -> None:
        """Have the first common save compared, and each tenth from then on: all hold it as long as it is common."""
        if newest is None or (self._seen and self._seen[-1] == newest):
            return
        self._seen.append(newest)
        if self._compare is not None and any(self._compare not in held for held in self._held.values()):
            self._compare = None  # somebody has given it up
        if self._compare is None and (not self._alike or len(self._seen) >= EACH):
            self._compare, self._digests, self._seen = newest, {}, [newest]
