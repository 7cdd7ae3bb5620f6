"""Loads a checkpoint's file with torch's own loader, into memory that belongs to the caller alone."""

import pickle
import re
from pathlib import Path
from typing import Any, cast

import torch

from fastckpt._core.transfer.host_copy import Copy, HostCopy
from fastckpt.errors import BadCheckpoint


def load_copy(path: Path, threads: int, *, weights_only: bool) -> Any:
    """What ``torch.load(path)`` gives, on the CPU, for about the price of one copy.

    No tensor aliases the file: it may change once this returns. Tensors that shared a storage share one again, and
    storages are aligned as torch aligns them (64 bytes).

    Raises:
        BadCheckpoint: A tensor reaches beyond its storage.
        Exception: Whatever torch.load raises for a file that it cannot read; see LOAD_ERRORS.
    """
    copies: list[Copy] = []
    fresh: list[torch.UntypedStorage] = []

    def into_fresh_memory(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        target = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        copies.append((target.data_ptr(), storage, storage.nbytes()))
        fresh.append(target)
        return target

    # torch.load calls it with untyped storages; its annotation says otherwise
    locate = cast(Any, into_fresh_memory)
    try:
        state = torch.load(path, map_location=locate, mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not (refused := re.findall(r"GLOBAL (\S+)", str(error))):
            raise
        raise pickle.UnpicklingError(
            f"{path} has {refused[0]}, which torch.load(weights_only=True) refuses: pass weights_only=False to the "
            "checkpointer if you trust whoever wrote it, or allow it with torch.serialization.add_safe_globals"
        ) from error
    for target, (address, _, size) in zip(fresh, copies, strict=True):
        if (target.data_ptr(), target.nbytes()) != (address, size):
            # For one that is too small torch makes a new one, of what size it may be, and frees what we had
            raise BadCheckpoint(f"{path} is damaged: a tensor of {target.nbytes()} bytes has a storage of {size}")
    filler = HostCopy(threads, fresh=True)
    try:
        filler.fill([copy for copy in copies if copy[2]])
    finally:
        filler.close()
    return state
