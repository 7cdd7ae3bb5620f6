"""Lets all ranks see what each of them says: JSON over the store that formed the process group."""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch.distributed as dist

from fastckpt._core.client.job_store import GLANCE, TIMEOUT, forgetting_addresses, job_store, session
from fastckpt.errors import ConfigError, FastckptError

LONGEST_GLANCE = timedelta(seconds=64)
"""After a glance it is seen whether a rank that has said nothing has left; each glance is twice as long."""
ANY = "any"
"""The key that says that a rank has left; its own says which."""

Answers = Callable[[], list[Any]]


class PeerDeparted(FastckptError):
    """A rank has left an agreement, and says nothing any more."""


class Agreement(Protocol):
    """A collective of all ranks: called by each of them, in the same order."""

    def say(self, value: Any) -> Answers:
        """Let the others know (JSON), without waiting for them; what every rank says, in the order of ranks.

        The function returned waits for all, and is called once before the next `say`.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """What every rank says (JSON), in the order of ranks."""
        ...

    def beside(self, name: str) -> "Agreement":
        """Another one of the same ranks, that may be used while answers of this one are outstanding."""
        ...

    def leave(self) -> None:
        """Say nothing any more, here and in those beside it: who waits for this rank gets `PeerDeparted`."""
        ...


class SingleRank:
    """The agreement of a job of one."""

    def say(self, value: Any) -> Answers:
        """What the one rank says."""
        said = json.dumps(value)
        return lambda: [json.loads(said)]

    def gather(self, value: Any) -> list[Any]:
        """What the one rank says."""
        return self.say(value)()

    def beside(self, name: str) -> Agreement:
        """The same, which keeps nothing."""
        return self

    def leave(self) -> None:
        """Nobody waits."""


class StoreAgreement:
    """An agreement over the store of the default process group; no tensors, no pickles.

    Agreements of other names go on beside it: between what is said in one and its answers, another may be made.
    """

    _rounds: ClassVar[defaultdict[tuple[str, str], Iterator[int]]] = defaultdict(itertools.count)

    def __init__(self, name: str, of: str = "") -> None:
        """Make one, beside the one ``of`` a name, if that is given: who leaves that leaves this.

        All ranks make one, and the first one together; raises torch's DistStoreError if a rank does not come.
        """
        self._name, self._of, self._rank = name, of or name, dist.get_rank()
        self._store, self._departures = job_store(name), job_store(f"{self._of}/left")
        self._round = self._rounds[session(), name]

    def say(self, value: Any) -> Answers:
        """Set this rank's word; the answers raise torch's DistStoreError if a rank does not come, or Departed."""
        world, rank, number = dist.get_world_size(), dist.get_rank(), next(self._round)
        keys = [f"{number}/{each}" for each in range(world)]
        forget = forgetting_addresses() if number == 0 else None
        self._store.set(keys[rank], json.dumps(value))

        def answers() -> list[Any]:
            self._wait(keys)
            said = [json.loads(self._store.get(key)) for key in keys]
            if number:  # whoever spoke in this round has heard the one before
                self._store.delete_key(f"{number - 1}/{rank}")
            if forget is not None:
                forget()
            return said

        return answers

    def _wait(self, keys: list[str]) -> None:
        end, patience = time.monotonic() + TIMEOUT.total_seconds(), GLANCE
        while True:
            try:
                self._store.wait(keys, patience)
                return
            except RuntimeError as error:  # each kind of store has its own for this
                if "timeout" not in str(error).lower() or time.monotonic() > end:
                    raise
            patience = min(2 * patience, LONGEST_GLANCE)
            if not self._departures.check([ANY]):  # one question, as long as all are here
                continue
            gone = [rank for rank in range(len(keys)) if self._departures.check([str(rank)])]
            if lacking := [rank for rank in gone if not self._store.check([keys[rank]])]:
                raise PeerDeparted(f"rank {lacking[0]} has closed")

    def gather(self, value: Any) -> list[Any]:
        """What every rank says; raises torch's DistStoreError if a rank does not come, or Departed."""
        return self.say(value)()

    def beside(self, name: str) -> Agreement:
        """The agreement of this name within this one's."""
        return StoreAgreement(f"{self._name}/{name}", self._of)

    def leave(self) -> None:
        """Say so in the store, unless that is gone, as the others are then."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._departures.set(str(self._rank), "")
            self._departures.set(ANY, "")


def agreement(world_size: int, name: str = "resume") -> Agreement:
    """The agreement of this job's ranks that bears this name; raises FastckptError if they cannot talk yet."""
    if world_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise FastckptError(
            f"load_checkpoint() and resume() are agreements of all {world_size} ranks: call "
            f"torch.distributed.init_process_group() first, on every rank"
        )
    return StoreAgreement(name)


def check_alike(wishes: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError unless all ranks ask for the same."""
    for name in wishes[0]:
        given = [wish[name] for wish in wishes]
        if len(set(given)) > 1:
            raise ConfigError(f"{name} must be the same on all ranks; rank by rank it is {given[:8]}")
