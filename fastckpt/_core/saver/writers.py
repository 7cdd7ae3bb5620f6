"""The writers of a checkpoint directory on this node: their presence, progress and histories."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastckpt._core.error_codes import coded
from fastckpt._core.format.ids import LARGEST, SaveId
from fastckpt._core.memory.processes import Process
from fastckpt.errors import FastckptError

NEVER = SaveId(LARGEST, LARGEST)
"""Next save of a writer that has left: none."""
REMEMBERED = 16
"""Saves that are remembered, at most: of each rank, and with the rank that began them first."""
CLOSED = "has closed"
"""Departure of a writer that deregistered."""
ENDED = "has ended without closing its checkpointer"
"""Departure of a writer that did not deregister."""
FAILED = "could not write its part"
"""Failure of a writer that is still here; the save is without its part."""


@dataclass(frozen=True)
class Loan:
    """Part of a closed writer that later saves take over: its files with their sizes (bytes), and its details."""

    files: Mapping[str, int]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Departure:
    """A writer that is here no more.

    Attributes:
        how: In words.
        last: The newest save that it has begun; None for none.
        history: The one that it wrote.
        loan: Part that it lends to all saves of this history from that one on; None for none.
    """

    how: str
    last: SaveId | None
    history: int = 0
    loan: Loan | None = None

    def lends_to(self, save: SaveId) -> bool:
        """Return whether a save may take over the part that it lends."""
        return self.loan is not None and save.history == self.history and (self.last is None or save >= self.last)


class CopyPace:
    """Counts the saves of each rank in a history, to see that ranks that save a step are at the same place.

    A save is refused as long as none was at the same place for two ranks. Later, a rank that has left out a save, for
    example because it failed, is behind by one from then on.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, deque[SaveId]] = {}
        self._first: dict[SaveId, tuple[int, int]] = {}
        self._matched = 0

    def begin(self, rank: int, save: SaveId) -> None:
        """A rank begins a save that it has not begun before."""
        history, count = self._counts.get(rank, (save.history, 0))
        self._counts[rank] = save.history, count + 1 if history == save.history else 1
        self._begun.setdefault(rank, deque(maxlen=REMEMBERED)).append(save)
        self._first.setdefault(save, (rank, self._counts[rank][1]))
        # Bounded, because a job may save for weeks.
        while len(self._first) > REMEMBERED:
            del self._first[min(self._first)]

    def differs(self, rank: int, save: SaveId) -> tuple[int, int, int] | None:
        """Compare the numbers that two ranks give to a save.

        Return the rank that began this save first, its number, and this rank's number; None if the numbers are equal.
        """
        first, theirs = self._first.get(save, (rank, 0))
        ours = self._counts.get(rank, (0, 0))[1]
        if rank == first:
            return None
        if theirs == ours:
            self._matched = save.history
        return None if theirs == ours or self._matched == save.history else (first, theirs, ours)

    def left_out(self, rank: int, save: SaveId) -> bool:
        """Return whether a rank has begun saves before and after this one, and not this."""
        begun = self._begun.get(rank, ())
        return save not in begun and any(each < save for each in begun)

    def forget(self, rank: int) -> None:
        """Another process has the rank's number."""
        self._counts.pop(rank, None)
        self._begun.pop(rank, None)


class Writers:
    """One generation after the other of ``count`` local ranks. All of them take part in each save, or none does.

    Attributes:
        newest_history: The newest history that was opened, found at the start, or saved in.
        elsewhere: A rank of another node that has closed and lends nothing, and its last save; None for none.
    """

    def __init__(self, count: int) -> None:
        self.newest_history = 0
        self.elsewhere: tuple[int, SaveId] | None = None
        self._count = count
        self._ranks: dict[int, int] = {}
        self._latest: dict[int, SaveId] = {}
        self._pace = CopyPace()
        self._present: dict[int, Process] = {}
        self._gone: dict[int, Departure] = {}
        self._former: dict[int, Departure] = {}
        self._failed: dict[int, tuple[SaveId, str]] = {}
        self._histories: list[int] = []
        self._rounds: dict[int, int] = {}

    def join(self, rank: int, pid: int, of_job: int) -> int:
        """A rank is here, ``of_job`` among all nodes; the history that it writes.

        Raises FastckptError while it has another checkpointer open, or another process that lives is this rank.
        """
        other = self._present.get(rank)
        if other is not None and other.pid == pid:
            raise FastckptError(
                f"process {pid} has a checkpointer for this directory open already, and may have one at a time: close "
                "that one first, or use it"
            )
        if other is not None and other.is_alive():
            raise FastckptError(
                coded(
                    f"process {pid} says that it is rank {of_job}, but that is process {other.pid}, which has a "
                    "checkpointer for this directory open. Start what saves beside a rank with a directory of its own, "
                    "and without RANK and FASTCKPT_AGENT in its environment; what only reads needs no checkpointer "
                    "(docs/reference/format.md)",
                    "FC-047",
                )
            )
        self._present[rank] = Process.of(pid)
        self._ranks[rank] = of_job
        # A new process: its predecessor's saves do not count for it.
        self._latest.pop(rank, None)
        self._pace.forget(rank)
        if rank in self._gone:  # it has another checkpointer now, and writes another history
            self._former[rank] = self._gone.pop(rank)
        return self.next_history(rank)

    def leave(self, rank: int, history: int, loan: Loan | None = None) -> None:
        """A rank that wrote a history deregisters."""
        self._present.pop(rank, None)
        self._gone[rank] = Departure(CLOSED, self._latest.get(rank), history, loan)

    def withdraw(self, rank: int) -> None:
        """Forget the part that a rank lent: it is gone, or there is no memory for it."""
        for gone in (self._gone, self._former):
            if rank in gone:
                gone[rank] = replace(gone[rank], loan=None)

    def lose(self, rank: int, pid: int) -> bool:
        """A rank has disconnected or died without deregistering; False if it was gone before."""
        # Its deregistration came first, or another process has the rank by now.
        if (process := self._present.get(rank)) is None or process.pid != pid:
            return False
        del self._present[rank]
        self._gone[rank] = Departure(ENDED, self._latest.get(rank))
        return True

    def next_history(self, rank: int) -> int:
        """Open a history for a rank: when it joins, and when it resumes again; the n-th is the same for all ranks."""
        number = self._rounds[rank] = self._rounds.get(rank, 0) + 1
        # The first rank to open its n-th history opens it for all: they join at different times.
        if number > len(self._histories):
            self.newest_history += 1
            self._histories.append(self.newest_history)
        return self._histories[number - 1]

    def begin(self, rank: int, save: SaveId) -> bool:
        """A rank begins a save; whether it has begun that one before."""
        self._gone.pop(rank, None)  # another process of that rank was lost, not this one
        self._failed.pop(rank, None)
        again = self._latest.get(rank) == save
        self._latest[rank] = max(save, self._latest.get(rank, save))
        if not again:
            self._pace.begin(rank, save)
        self.newest_history = max(self.newest_history, save.history)  # the ranks of all nodes take the newest of all
        return again

    def fail(self, rank: int, save: SaveId, why: str) -> None:
        """A rank could not write its part of a save, unless it begins that again."""
        self._failed[rank] = save, why

    def out_of_step(self, rank: int, save: SaveId) -> str:
        """Return why a save of a rank is not the one that another rank began under this id; empty if it may be."""
        if (other := self._pace.differs(rank, save)) is None:
            return ""
        first, theirs, ours = other
        return (
            f"step {save.step} is save number {ours} of {self.name(rank)}, and number {theirs} of {self.name(first)}: "
            "they count steps differently, so their parts do not belong together. Have every rank save the same steps"
        )

    def passed_over(self, save: SaveId, lacking: Collection[int]) -> str:
        """Return, in words, a rank that a save lacks and that has gone on without it; empty for none."""
        for rank in sorted(lacking):
            if rank in self._present and self._latest.get(rank, save) > save and self._pace.left_out(rank, save):
                return f"{self.name(rank)} went on to step {self._latest[rank].step} without saving step {save.step}"
        return ""

    @property
    def ranks(self) -> Mapping[int, int]:
        """The global ranks of the local ranks."""
        return self._ranks

    @property
    def latest(self) -> Mapping[int, SaveId]:
        """The newest id that each rank has begun; `NEVER` for one that is gone."""
        return self._latest | dict.fromkeys(self._gone, NEVER)

    @property
    def is_new(self) -> bool:
        """True if no writer of this generation has come yet."""
        return not self._histories

    @property
    def all(self) -> frozenset[int]:
        """The ranks that must write their part of each save, or lend it."""
        return frozenset(range(self._count))

    @property
    def deserted(self) -> bool:
        """True if all have deregistered."""
        return self._gone.keys() >= self.all and not self._present

    def lenders(self, save: SaveId) -> Iterator[tuple[int, Loan]]:
        """Yield the ranks that are gone and lend their parts to a save."""
        for rank, departure in self._gone_from(save):
            if departure.loan is not None and departure.lends_to(save):
                yield rank, departure.loan

    def obstacle(self, save: SaveId, lacking: Collection[int] | None = None) -> str:
        """Return why a save can never be whole: a rank that lends nothing is gone, or one has failed; empty if it may.

        ``lacking`` are the ranks with missing parts; None for a save that is yet to begin.
        """
        for rank, departure in self._gone_from(save):
            if (lacking is None or rank in lacking) and not departure.lends_to(save):
                return f"{self.name(rank)} {departure.how}"
        for rank in lacking or ():
            failed, why = self._failed.get(rank, (None, ""))
            if failed == save:
                return f"{self.name(rank)} {FAILED}: {why}"
        if self.elsewhere is not None and save.history == self.elsewhere[1].history and save > self.elsewhere[1]:
            return f"rank {self.elsewhere[0]} {CLOSED}"
        return ""

    def _gone_from(self, save: SaveId) -> list[tuple[int, Departure]]:
        """Return the ranks that do not take part in a save: gone, or in a later history with another checkpointer."""
        former = {rank: each for rank, each in self._former.items() if save.history <= each.history}
        return sorted((self._gone | former).items())

    def name(self, rank: int) -> str:
        """A local rank in words, by its number among the ranks of all nodes."""
        return f"rank {self._ranks.get(rank, rank)}"

    def is_inside(self, rank: int, save: SaveId) -> bool:
        """Return whether a rank is here, and may be copying its part of a save."""
        return rank in self._present and self._latest.get(rank) == save

    def restart(self) -> None:
        """All of them are dead; others come."""
        self._latest.clear()
        self._pace = CopyPace()
        self._present.clear()
        self._gone.clear()
        self._former.clear()
        self._failed.clear()
        self._histories.clear()
        self._rounds.clear()
        self.elsewhere = None
