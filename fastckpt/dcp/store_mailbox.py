"""Messages between the ranks of a job, by way of the store that formed its process group."""

import io
import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata, planner

from fastckpt._core.client.job_store import job_store
from fastckpt._core.torch_private.sharding import PLAN_PARTS
from fastckpt.errors import FastckptError

PIECE = 4 << 20
"""Bytes of a message that the store is given at once; it refuses more than 8 MiB."""
LONGEST_PAUSE = 0.05
"""Seconds between two looks at whether a message is there."""
_PARTS = (
    *PLAN_PARTS,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.TensorProperties,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    torch.Size,
)
"""What a plan consists of, beside dtypes and what is plain; nothing else is unpickled."""
_ALLOWED = {(part.__module__, part.__name__): part for part in _PARTS}


class Overtaken(Exception):
    """Who waits for a message need not, any more."""


class _Unpickler(pickle.Unpickler):
    """Reads messages; torch.load(weights_only=True) takes ten times as long for a plan of thousands of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """What may stand in a message; raises UnpicklingError for all else."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"a message of another rank has {module}.{name}")
        return found


class StoreMailbox:
    """Where ranks leave messages: who writes waits for nobody, who reads waits until a deadline at most."""

    def __init__(self, store: "dist.distributed_c10d.Store") -> None:
        self._store = store

    def put(self, key: str, message: Any) -> None:
        """Leave a message of what a `SavePlan` may consist of."""
        data = pickle.dumps(message)
        starts = range(0, len(data), PIECE)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", data[start : start + PIECE])  # type: ignore[arg-type]
        self._store.set(key, str(len(starts)))

    def get(self, key: str, end: float, unless: str = "") -> Any:
        """The message, once it is there.

        Args:
            key: Where it is left.
            end: When to wait no longer, by time.monotonic.
            unless: A word that makes the message needless.

        Raises:
            TimeoutError: It has not come.
            Overtaken: The other word was said first.
        """
        self._wait(lambda: self._store.check([key]), key, end, unless)
        count = int(self._store.get(key))
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(count))
        return _Unpickler(io.BytesIO(data)).load()

    def meet(self, key: str, count: int, end: float, unless: str) -> None:
        """Return when so many ranks have come here; raises as `get`."""
        self._store.add(key, 1)
        self._wait(lambda: self._store.add(key, 0) >= count, key, end, unless)

    def _wait(self, has_come: Callable[[], bool], key: str, end: float, unless: str) -> None:
        pauses = (min(LONGEST_PAUSE, 0.001 * 1.2**turn) for turn in itertools.count())
        while not has_come():
            if unless and self._store.check([unless]):
                if has_come():  # since the last look, and before that word
                    return
                raise Overtaken(unless)
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(next(pauses))

    def forget(self, key: str) -> None:
        """Take away what `meet` has left, when all have gone on."""
        self._store.delete_key(key)

    def remove(self, key: str) -> None:
        """Take a message away that everybody has read."""
        if self._store.check([key]):
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)

    def word(self, key: str) -> str | None:
        """The short word under a key; None if nobody has said one. One question to the store."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def say(self, key: str, word: str) -> str:
        """Say a short word, which everybody sees from the return on; what was said there first, by whomever."""
        said: bytes = self._store.compare_set(key, "", word)
        return said.decode()


def board(world_size: int, name: str) -> StoreMailbox:
    """The board of this job's ranks that bears this name, which all of them call for.

    Raises FastckptError if they cannot talk yet, and torch's DistStoreError if one of them does not come.
    """
    if world_size == 1:
        return StoreMailbox(dist.HashStore())  # type: ignore[attr-defined]
    if not dist.is_initialized():
        raise FastckptError(
            f"{world_size} ranks plan their saves together: call torch.distributed.init_process_group first"
        )
    return StoreMailbox(job_store(name))
