"""Loads a file of a checkpoint with torch's own loader, into memory that belongs to the caller alone."""

import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from fastckpt._core.error_codes import coded
from fastckpt._core.format.loadable import refused_class
from fastckpt._core.transfer.host_copy import Copy, fill_fresh
from fastckpt.errors import BadCheckpoint, NoRankState

LOAD_ERRORS = (
    BadCheckpoint,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    AssertionError,
    BufferError,
    ImportError,
    MemoryError,
    struct.error,
    pickle.UnpicklingError,
)
"""Errors that torch.load can raise for a damaged file."""


def load_copy(path: Path, threads: int, *, weights_only: bool) -> Any:
    """Load as ``torch.load(path)`` does, on the CPU, for about the price of one copy.

    No tensor aliases the file: it may change once this returns. Tensors that shared a storage share one again, and
    storages are aligned as torch aligns them (64 bytes).

    Raises:
        BadCheckpoint: A tensor reaches beyond its storage.
        Exception: Any error of torch.load for a file that it cannot read; see LOAD_ERRORS.
    """
    # 1. let torch.load map the file and rebuild the tensors on empty storages of their own   2. check that these are
    # still the storages that were handed out   3. copy the mapped bytes into them, with all threads
    copies: list[Copy] = []
    fresh: list[torch.UntypedStorage] = []

    def into_fresh_memory(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        target = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        copies.append((target.data_ptr(), storage, storage.nbytes()))
        fresh.append(target)
        return target

    # torch.load calls it with untyped storages, unlike its annotation
    locate = cast(Any, into_fresh_memory)
    try:
        state = torch.load(path, map_location=locate, mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise refusal(str(path), error) from error
    for target, (address, _, size) in zip(fresh, copies, strict=True):
        if (target.data_ptr(), target.nbytes()) != (address, size):
            # For a tensor larger than its storage torch resizes it, which frees the memory at this address.
            raise BadCheckpoint(f"{path} is damaged: a tensor of {target.nbytes()} bytes has a storage of {size}")
    fill_fresh([copy for copy in copies if copy[2]], threads)
    return state


def refusal(name: str, error: pickle.UnpicklingError) -> pickle.UnpicklingError:
    """The error of ``torch.load(weights_only=True)``, with the name of the file, and a remedy."""
    if not (refused := refused_class(error)):
        return pickle.UnpicklingError(f"{name} cannot be unpickled: {error}")
    return pickle.UnpicklingError(
        f"{name} has {refused}, which torch.load(weights_only=True) refuses: pass weights_only=False to the "
        "checkpointer if you trust whoever wrote it, or allow it with torch.serialization.add_safe_globals"
    )


class RankState(dict[str, Any]):
    """The state that a rank saved for itself; its KeyError explains which state belongs into the common one.

    Args:
        state: The state that this rank saved; empty if it was no rank of the job that saved.
        rank: This rank.
        step: The step that was loaded.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, step: int) -> None:
        super().__init__(state)
        self._rank, self._step = rank, step

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()], None, None, Iterator[tuple[str, Any]]]:
        """Pickle as an OrderedDict, so that a file in which a user saves it loads with ``weights_only=True``."""
        return OrderedDict, (), None, None, iter(self.items())

    def __missing__(self, name: str) -> NoReturn:
        """Raise NoRankState."""
        there = ", ".join(map(repr, self)) or "nothing"
        raise NoRankState(
            coded(
                f"rank_state has no {name!r}: of step {self._step} rank {self._rank} has {there}. What a job with "
                "another number of ranks needs, such as the position of a ResumableDataLoader, belongs into the "
                f"common state: save_checkpoint(step, {{..., {name!r}: loader.state_dict()}}), and "
                f"load_checkpoint()[{name!r}]",
                "FC-021",
            )
        )
