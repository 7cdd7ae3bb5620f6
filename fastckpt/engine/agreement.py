"""Lets all ranks see what each of them says: JSON over the store that formed the process group."""

import itertools
import json
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from fastckpt.errors import FastckptError

TIMEOUT = timedelta(hours=1)
"""How long the slowest rank may take to verify its files, which may mean to download them, and to load them.

A rank that dies or gives up is no reason to wait: who launched it ends the others.
"""


class Agreement(Protocol):
    """A collective of all ranks: called by each of them, in the same order."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank says (JSON), in the order of ranks."""
        ...


class Alone:
    """The agreement of a job of one."""

    def gather(self, value: Any) -> list[Any]:
        """What the one rank says."""
        return [json.loads(json.dumps(value))]


class StoreAgreement:
    """An agreement over the store of the default process group; no tensors, no pickles."""

    _rounds = itertools.count()

    def __init__(self) -> None:
        self._store = dist.distributed_c10d.PrefixStore("fastckpt", dist.distributed_c10d._get_default_store())

    def gather(self, value: Any) -> list[Any]:
        """What every rank says; raises torch's DistStoreError if a rank does not come."""
        world, number = dist.get_world_size(), next(self._rounds)
        keys = [f"{number}/{rank}" for rank in range(world)]
        self._store.set(keys[dist.get_rank()], json.dumps(value))
        self._store.wait(keys, TIMEOUT)
        return [json.loads(self._store.get(key)) for key in keys]


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
