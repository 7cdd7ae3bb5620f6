"""Lets all ranks see what each of them says: JSON over the store that formed the process group."""

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from fastckpt.errors import FastckptError

TIMEOUT = timedelta(hours=1)
"""How long the slowest rank may take to verify its files, which may mean to download them, and to load them.

A rank that dies or gives up is no reason to wait: who launched it ends the others.
"""


Answers = Callable[[], list[Any]]


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


class Alone:
    """The agreement of a job of one."""

    def say(self, value: Any) -> Answers:
        """What the one rank says."""
        said = json.dumps(value)
        return lambda: [json.loads(said)]

    def gather(self, value: Any) -> list[Any]:
        """What the one rank says."""
        return self.say(value)()


class StoreAgreement:
    """An agreement over the store of the default process group; no tensors, no pickles."""

    _rounds = itertools.count()

    def __init__(self) -> None:
        self._store = dist.distributed_c10d.PrefixStore("fastckpt", dist.distributed_c10d._get_default_store())

    def say(self, value: Any) -> Answers:
        """Set this rank's word; the answers raise torch's DistStoreError if a rank does not come."""
        world, rank, number = dist.get_world_size(), dist.get_rank(), next(self._rounds)
        keys = [f"{number}/{each}" for each in range(world)]
        self._store.set(keys[rank], json.dumps(value))

        def answers() -> list[Any]:
            self._store.wait(keys, TIMEOUT)
            said = [json.loads(self._store.get(key)) for key in keys]
            if number:  # whoever spoke in this round has heard the one before
                self._store.delete_key(f"{number - 1}/{rank}")
            return said

        return answers

    def gather(self, value: Any) -> list[Any]:
        """What every rank says; raises torch's DistStoreError if a rank does not come."""
        return self.say(value)()


def agreement(world_size: int) -> Agreement:
    """The agreement of this job's ranks; raises FastckptError if they cannot talk yet."""
    if world_size == 1:
        return Alone()
    if not dist.is_initialized():
        raise FastckptError(
            f"load_checkpoint is an agreement of all {world_size} ranks: call "
            f"torch.distributed.init_process_group first"
        )
    return StoreAgreement()
