"""Tensors that must not be mutated while they are copied, and the check whether they were."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, count, repeat
from operator import ge, itemgetter, not_
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from fastckpt._core.format.plan import Plan
from fastckpt._core.snapshot.sampled_bytes import SampledBytes, SampledDeviceBytes
from fastckpt._core.torch_private.tensors import local_part, storage_key, version_of
from fastckpt._core.transfer.device_copy import CopyPiece
from fastckpt._core.transfer.host_copy import Copy, Span

WORTH = 16 << 10
"""Bytes below which a storage in host memory is copied in less time than it takes to watch it."""


class MutationCheck:
    """The storages of a state that only steps of the given optimizers change, as they are now.

    A storage is one of them only if every tensor of the state in it is a parameter of an optimizer or is in its
    ``state``. Tensors in param_groups (a tensor lr follows its scheduler), buffers, gradients and averages change
    elsewhere. Of a storage that has more than is saved, such as padding, the saved part counts as a storage.

    Args:
        derived: Tensors that change only after such a step begins, although no optimizer has them, such as those that a
            framework derives from an optimizer's parameters.
    """

    def __init__(
        self,
        plans: Iterable[Plan],
        optimizers: Sequence[Optimizer],
        derived: Iterable[torch.Tensor] = (),
    ) -> None:
        found = [each for plan in plans for each in _worth_watching(plan)]
        owners = _owners(optimizers, {tensor.data_ptr() for _, _, tensor, _ in found}) if found else {}
        unchanging = {storage_key(tensor.untyped_storage()) for tensor in derived}
        # One tensor that others may change is enough to copy its storage at once. Another process may write to a
        # shared storage, and tensors of inference mode have no version: neither could be detected.
        mutable = {
            storage_key(whole)
            for _, whole, tensor, _ in found
            if (_layout(tensor) not in owners and storage_key(whole) not in unchanging)
            or _is_shared(whole)
            or tensor.is_inference()
        }
        self._paths: dict[int, str] = {}
        self._places: list[tuple[torch.Tensor, int, str]] = []
        self._versions: list[tuple[torch.Tensor, int, str]] = []
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._samples = SampledBytes((), self._tensors_of)
        self._device_samples: list[SampledDeviceBytes] = []
        for storage, whole, tensor, path in found:
            if storage_key(whole) not in mutable:
                self._tensors.setdefault(storage_key(storage), []).append(tensor)
                self._paths.setdefault(storage_key(storage), path)
                self._places.append((tensor, tensor.data_ptr(), path))
                # those of the optimizers, too: a tensor taken by way of .data has a version counter of its own
                watched = (tensor, *owners.get(_layout(tensor), ()))
                self._versions += [(each, version_of(each), path) for each in watched]

    def part(self, copies: Sequence[Copy]) -> tuple[list[Copy], list[Copy]]:
        """The copies to do at once, and those that can wait."""
        if not self._paths:
            return [*copies], []
        is_held = [*map(self._paths.__contains__, map(storage_key, map(itemgetter(1), copies)))]
        return [*compress(copies, map(not_, is_held))], [*compress(copies, is_held)]

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is one of them."""
        return storage_key(storage) in self._paths

    def in_memory(self) -> list[torch.UntypedStorage]:
        """Return the whole storages of the tensors that are in host memory."""
        return [tensor.untyped_storage() for tensor, _, _ in self._places if tensor.is_cpu]

    def path(self, storage: torch.UntypedStorage) -> str:
        """The path in the state of a tensor in one of the storages."""
        return self._paths[storage_key(storage)]

    def sample(self, copies: Sequence[Copy]) -> None:
        """Sample the bytes to copy from host memory, as they are now."""
        self._samples = SampledBytes(copies, self._tensors_of)

    def sample_device(self, copies: Sequence[Copy]) -> Sequence[CopyPiece]:
        """Have the current stream of their device sample the bytes to copy; the samples, to be sent to the host."""
        if not any(size for _, _, size in copies):
            return ()
        self._device_samples.append(samples := SampledDeviceBytes(copies, self._tensors_of))
        return [samples.piece]

    def compare(self, piece: Span, copied: bool) -> None:
        """Compare, as `SampledBytes.compare`."""
        self._samples.compare(piece, copied)

    def changed(self) -> str:
        """The path of a tensor that was written to or moved since; empty if none is seen to be.

        An operation raises the version of a tensor when it has written to it. Writes by way of ``.data``, numpy,
        collectives or another process raise none: these are seen in the samples, if they change much.
        """
        # cheap checks first: addresses, then versions, then samples
        # A tensor that is resized, or whose .data is replaced, has another address, which no version shows.
        moved = (path for tensor, place, path in self._places if tensor.data_ptr() != place)
        written = (path for tensor, version, path in self._versions if version_of(tensor) != version)
        return next(moved, "") or next(written, "") or self._path(self._samples.differing_source())

    def miscopied(self) -> str:
        """The path of a tensor whose finished copy differs from the samples taken at the save; empty for none."""
        on_devices = (self._path(each.differing_copy()) for each in self._device_samples)
        return self._path(self._samples.differing_copy()) or next(filter(None, on_devices), "")

    def _path(self, storage: torch.UntypedStorage | None) -> str:
        return "" if storage is None else self.path(storage)

    def _tensors_of(self, storage: torch.UntypedStorage) -> Sequence[torch.Tensor]:
        return self._tensors[storage_key(storage)]


class Digests:
    """Digests of the storages to copy, as they are now: each change shows, also one that raises no version."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._digests = [(copy, _digest_of(copy[1], copy[2])) for copy in copies]

    def differing(self) -> torch.UntypedStorage | None:
        """A storage that has changed, or whose copy is not as it was; None if all are unchanged."""
        for (target, storage, size), before in self._digests:
            if before != _digest_of(storage, size) or before != _digest(target, size):
                return storage
        return None


def _worth_watching(plan: Plan) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage, torch.Tensor, str]]:
    """Tensors in storages that are not small, each after the saved part of its storage and the whole; their paths."""
    wholes = [*map(torch.Tensor.untyped_storage, plan.tensors)]
    sizes = map(torch.UntypedStorage.nbytes, wholes)
    least = [1 if not tensor.is_cpu else WORTH for tensor in plan.tensors] if plan.device else repeat(WORTH)
    return [
        (plan.storages[plan.indices[i]], wholes[i], plan.tensors[i], plan.paths[i])
        for i in compress(count(), map(ge, sizes, least))
        if plan.skeleton.gaps[plan.indices[i]].size
    ]


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Return whether other processes share it; torch reports every storage on a device as shared."""
    return storage.device.type == "cpu" and storage.is_shared()


def _digest_of(storage: torch.UntypedStorage, size: int) -> bytes:
    if storage.device.type != "cpu":
        # The training stream may still be computing these bytes; this is the checked mode, where waiting is accepted.
        torch.accelerator.synchronize(storage.device)
        storage = storage.cpu()  # type: ignore[no-untyped-call]
    return _digest(storage.data_ptr(), size)


def _digest(address: int, size: int) -> bytes:
    return xxhash.xxh3_128_digest((ctypes.c_char * size).from_address(address))


Layout = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _layout(tensor: torch.Tensor) -> Layout:
    # Not the tensor's identity: state_dict() returns detached tensors over the storages of the parameters.
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _owners(optimizers: Iterable[Optimizer], places: set[int]) -> dict[Layout, list[torch.Tensor]]:
    """The tensors of the optimizers that begin at one of these addresses, by their layout."""
    found: dict[Layout, list[torch.Tensor]] = {}
    for optimizer in optimizers:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for tensor in (*parameters, *_tensors(optimizer.state)):
            local = local_part(tensor)
            # The plan copies a DTensor's local part; sparse tensors have no storage of their own to compare.
            if local.layout is torch.strided and local.data_ptr() in places:
                found.setdefault(_layout(local), []).append(local)
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
