"""The writers of a checkpoint directory on this node: who is here, how far each is, which history each writes."""

from collections.abc import Mapping

from fastckpt.errors import FastckptError
from fastckpt.format.ids import LARGEST, SaveId

NEVER = SaveId(LARGEST, LARGEST)
"""What a writer that has left begins next."""


class Writers:
    """One generation after the other of ``count`` local ranks.

    Attributes:
        newest_history: The newest history that was opened, found at the start, or saved in.
    """

    def __init__(self, count: int) -> None:
        self.newest_history = 0
        self._count = count
        self._latest: dict[int, SaveId] = {}
        self._present: dict[int, int] = {}
        self._histories: list[int] = []
        self._rounds: dict[int, int] = {}

    def join(self, rank: int, pid: int) -> int:
        """A rank is here; the history that it writes. Raises FastckptError while it has another checkpointer open."""
        if self._present.get(rank) == pid:
            raise FastckptError(
                f"process {pid} has a checkpointer for this directory open already; close that one first, or use it"
            )
        self._present[rank] = pid
        self._latest.pop(rank, None)
        return self.next_history(rank)

    def leave(self, rank: int) -> None:
        """A rank takes leave: saves do not wait for it any more. (They do for one that died.)"""
        self._latest[rank] = NEVER
        self._present.pop(rank, None)

    def lose(self, rank: int, pid: int) -> None:
        """A rank hung up or died."""
        if self._present.get(rank) == pid:
            del self._present[rank]

    def next_history(self, rank: int) -> int:
        """Open a history for a rank: when it joins, and when it resumes again; the n-th is the same for all ranks."""
        number = self._rounds[rank] = self._rounds.get(rank, 0) + 1
        if number > len(self._histories):
            self.newest_history += 1
            self._histories.append(self.newest_history)
        return self._histories[number - 1]

    def begin(self, rank: int, save: SaveId) -> bool:
        """A rank begins a save; whether it has begun that one before."""
        again = self._latest.get(rank) == save
        self._latest[rank] = max(save, self._latest.get(rank, save))
        self.newest_history = max(self.newest_history, save.history)  # the ranks of all nodes take the newest of all
        return again

    @property
    def latest(self) -> Mapping[int, SaveId]:
        """The newest id that each rank has begun."""
        return self._latest

    @property
    def expected(self) -> frozenset[int]:
        """The ranks that must write their part: all but those that have left, the late ones too."""
        return frozenset(rank for rank in range(self._count) if self._latest.get(rank) != NEVER)

    def restart(self) -> None:
        """All of them are dead; others come."""
        self._latest.clear()
        self._present.clear()
        self._histories.clear()
        self._rounds.clear()
