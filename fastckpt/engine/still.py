"""What of a state stands still until an optimizer's next step, and whether it did."""

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from fastckpt.format.plan import Plan
from fastckpt.memory.fill import Copy

WORTH = 16 << 10
"""Below this many bytes a storage is copied in less time than it takes to watch it."""


class Still:
    """The storages of a state that only steps of the given optimizers change, as they are now.

    A storage is one of them only if every tensor of the state in it is a parameter of an optimizer or lies in its
    ``state``: param_groups (a tensor lr follows its scheduler), buffers, gradients and averages change elsewhere.
    """

    def __init__(self, plans: Iterable[Plan], optimizers: Sequence[Optimizer]) -> None:
        found = [
            (plan.storages[index], tensor, path)
            for plan in plans
            for (tensor, index), path in zip(plan.tensors, plan.paths, strict=True)
            if plan.skeleton.gaps[index].size >= WORTH
        ]
        owners = _owners(optimizers, {tensor.data_ptr() for _, tensor, _ in found})
        moving = {
            storage._cdata
            for storage, tensor, _ in found
            if _layout(tensor) not in owners or not tensor.is_cpu or storage.is_shared() or tensor.is_inference()
        }
        self._paths: dict[int, str] = {}
        self._places: list[tuple[torch.Tensor, int, str]] = []
        self._versions: list[tuple[torch.Tensor, int, str]] = []
        for storage, tensor, path in found:
            if storage._cdata not in moving:
                self._paths.setdefault(storage._cdata, path)
                self._places.append((tensor, tensor.data_ptr(), path))
                # those of the optimizers, too: what came into the state by way of .data counts on its own
                watched = (tensor, *owners[_layout(tensor)])
                self._versions += [(each, each._version, path) for each in watched]

    def part(self, copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
        """The copies to do at once, and those that can wait."""
        now: list[Copy] = []
        later: list[Copy] = []
        for copy in copies:
            (later if copy[1]._cdata in self._paths else now).append(copy)
        return now, later

    def path(self, storage: torch.UntypedStorage) -> str:
        """Where a tensor in one of the storages stands in the state."""
        return self._paths[storage._cdata]

    def changed(self) -> str:
        """Where a tensor stands that was written to or moved since; empty if that is not seen of any.

        An operation raises the version of what it writes when it has written. Writes by way of ``.data``, numpy or
        another process raise none.
        """
        moved = (path for tensor, place, path in self._places if tensor.data_ptr() != place)
        written = (path for tensor, version, path in self._versions if tensor._version != version)
        return next(moved, "") or next(written, "")


class Digests:
    """Of the storages to copy, as they are now: shows each change, seen or unseen."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._digests = [(copy, _digest(copy[1].data_ptr(), copy[2])) for copy in copies]

    def differing(self) -> torch.UntypedStorage | None:
        """A storage that is no longer what it was, or of which the copy is not; None if all are."""
        for (target, storage, size), before in self._digests:
            if before != _digest(storage.data_ptr(), size) or before != _digest(target, size):
                return storage
        return None


def _digest(address: int, size: int) -> bytes:
    return hashlib.blake2b((ctypes.c_char * size).from_address(address), digest_size=16).digest()


Layout = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _owners(optimizers: Iterable[Optimizer], places: set[int]) -> dict[Layout, list[torch.Tensor]]:
    """The tensors of the optimizers that begin at one of these addresses, by their layout."""
    found: dict[Layout, list[torch.Tensor]] = {}
    for optimizer in optimizers:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for tensor in (*parameters, *_tensors(optimizer.state)):
            if tensor.layout is torch.strided and tensor.data_ptr() in places:
                found.setdefault(_layout(tensor), []).append(tensor)
    return found


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for child in node.values():
            yield from _tensors(child)
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _tensors(child)
