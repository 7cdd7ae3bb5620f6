"""The writers of a checkpoint directory on this node: who is here, how far each is, which history each writes."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastckpt.errors import FastckptError
from fastckpt.format.ids import LARGEST, SaveId

NEVER = SaveId(LARGEST, LARGEST)
"""What a writer that has left begins next."""
CLOSED = "has closed"
"""How a writer has left that took leave."""


@dataclass(frozen=True)
class Loan:
    """What a writer that has closed lends to later saves: its files and their sizes (bytes), and its details."""

    files: Mapping[str, int]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Departure:
    """A writer that is here no more.

    Attributes:
        how: In words.
        last: The newest save that it has begun; None for none.
        history: The one that it wrote.
        loan: What it lends to all of this history from that one on; None for nothing.
    """

    how: str
    last: SaveId | None
    history: int = 0
    loan: Loan | None = None

    def lends_to(self, save: SaveId) -> bool:
        """Whether a save may take its part from what it lends."""
        return self.loan is not None and save.history == self.history and (self.last is None or save >= self.last)


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
        self._present: dict[int, int] = {}
        self._gone: dict[int, Departure] = {}
        self._former: dict[int, Departure] = {}
        self._histories: list[int] = []
        self._rounds: dict[int, int] = {}

    def join(self, rank: int, pid: int, of_job: int) -> int:
        """A rank is here, ``of_job`` among all nodes; the history that it writes.

        Raises FastckptError while it has another checkpointer open.
        """
        if self._present.get(rank) == pid:
            raise FastckptError(
                f"process {pid} has a checkpointer for this directory open already, and may have one at a time: close "
                "that one first, or use it"
            )
        self._present[rank] = pid
        self._ranks[rank] = of_job
        self._latest.pop(rank, None)
        if rank in self._gone:  # it has another checkpointer now, and writes another history
            self._former[rank] = self._gone.pop(rank)
        return self.next_history(rank)

    def leave(self, rank: int, history: int, loan: Loan | None = None) -> None:
        """A rank that wrote a history takes leave."""
        self._present.pop(rank, None)
        self._gone[rank] = Departure(CLOSED, self._latest.get(rank), history, loan)

    def withdraw(self, rank: int) -> None:
        """What a rank lent is not there any more, or there is no memory for it."""
        for gone in (self._gone, self._former):
            if rank in gone:
                gone[rank] = replace(gone[rank], loan=None)

    def lose(self, rank: int, pid: int) -> bool:
        """A rank hung up or died without taking leave; False if it was gone before."""
        if self._present.get(rank) != pid:
            return False
        del self._present[rank]
        self._gone[rank] = Departure("has ended without closing its checkpointer", self._latest.get(rank))
        return True

    def next_history(self, rank: int) -> int:
        """Open a history for a rank: when it joins, and when it resumes again; the n-th is the same for all ranks."""
        number = self._rounds[rank] = self._rounds.get(rank, 0) + 1
        if number > len(self._histories):
            self.newest_history += 1
            self._histories.append(self.newest_history)
        return self._histories[number - 1]

    def begin(self, rank: int, save: SaveId) -> bool:
        """A rank begins a save; whether it has begun that one before."""
        self._gone.pop(rank, None)  # another process of that rank was lost, not this one
        again = self._latest.get(rank) == save
        self._latest[rank] = max(save, self._latest.get(rank, save))
        self.newest_history = max(self.newest_history, save.history)  # the ranks of all nodes take the newest of all
        return again

    @property
    def latest(self) -> Mapping[int, SaveId]:
        """The newest id that each rank has begun; `NEVER` for one that is gone."""
        return self._latest | dict.fromkeys(self._gone, NEVER)

    @property
    def is_new(self) -> bool:
        """Whether nobody of this generation has come yet."""
        return not self._histories

    @property
    def all(self) -> frozenset[int]:
        """The ranks that must write their part of each save, or lend it."""
        return frozenset(range(self._count))

    @property
    def deserted(self) -> bool:
        """Whether all have taken leave."""
        return self._gone.keys() >= self.all and not self._present

    def lenders(self, save: SaveId) -> Iterator[tuple[int, Loan]]:
        """Who is gone, and lends its part to a save."""
        for rank, departure in self._gone_from(save):
            if departure.loan is not None and departure.lends_to(save):
                yield rank, departure.loan

    def obstacle(self, save: SaveId, lacking: Collection[int] | None = None) -> str:
        """Why a save can never be whole, since a rank is gone that lends it nothing; empty if it may be.

        ``lacking`` are those of whom it lacks the parts; None for a save that is yet to begin.
        """
        for rank, departure in self._gone_from(save):
            if (lacking is None or rank in lacking) and not departure.lends_to(save):
                return f"{self.name(rank)} {departure.how}"
        if self.elsewhere is not None and save.history == self.elsewhere[1].history and save > self.elsewhere[1]:
            return f"rank {self.elsewhere[0]} {CLOSED}"
        return ""

    def _gone_from(self, save: SaveId) -> list[tuple[int, Departure]]:
        """Who takes no part in a save any more: gone, or on to a later history with another checkpointer."""
        former = {rank: each for rank, each in self._former.items() if save.history <= each.history}
        return sorted((self._gone | former).items())

    def name(self, rank: int) -> str:
        """A local rank in words, by its number among the ranks of all nodes."""
        return f"rank {self._ranks.get(rank, rank)}"

    def is_inside(self, rank: int, save: SaveId) -> bool:
        """Whether a rank is here, and may be copying its part of a save."""
        return rank in self._present and self._latest.get(rank) == save

    def restart(self) -> None:
        """All of them are dead; others come."""
        self._latest.clear()
        self._present.clear()
        self._gone.clear()
        self._former.clear()
        self._histories.clear()
        self._rounds.clear()
        self.elsewhere = None
