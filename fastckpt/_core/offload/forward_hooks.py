"""Hooks that autograd calls with each tensor that one forward saves, and when the backward wants it back."""

import logging
import os
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastckpt._core.death_notes import LivingObjects
from fastckpt._core.heap import return_freed_memory
from fastckpt._core.offload.activation_store import ActivationStore
from fastckpt._core.offload.exemptions import SMALLEST, is_plain, is_weight
from fastckpt._core.offload.forward_pass import ForwardPass, Occurrence
from fastckpt._core.offload.known_steps import StepMatch
from fastckpt._core.offload.packed_tensor import NOT_COPIED, NOTICED, LeftTensor, PackedTensor
from fastckpt._core.offload.saved_storage import Identity, SavedStorage, identity_of, span_of
from fastckpt._core.torch_private.tensors import is_traced, next_node_number
from fastckpt._core.transfer.device_copy import records_graph
from fastckpt.errors import OffloadError

logger = logging.getLogger("fastckpt")

Identities = LivingObjects[Identity, SavedStorage]


class ForwardHooks:
    """The hooks of one forward.

    Args:
        store: Store that counts and moves saved storages.
        identities: All saved storages that live, of this forward and others.
        forward: The record of this forward.
        match: Known steps of the same kind.
        copies: True if tensors are copied when they are packed, so that they may be changed in place afterwards.
        unmap: True if the C library shall give freed memory back to the system, once some of it is offloaded.
    """

    def __init__(
        self,
        store: ActivationStore,
        identities: Identities,
        forward: ForwardPass,
        match: StepMatch,
        *,
        copies: bool,
        unmap: bool,
    ) -> None:
        self.forward = forward
        self.left = 0
        """Bytes of tensors below the least size: they stay."""
        self._pid = os.getpid()
        self._store = store
        self._identities = identities
        self._match = match
        self._copies = copies
        self._unmap = unmap

    def pack(self, tensor: torch.Tensor) -> LeftTensor | PackedTensor:
        """Put an object in the place of a tensor that autograd saves."""
        on_gpu = tensor.device.type == "cuda"
        # In a process that was forked within the forward there are no threads that would write.
        left = os.getpid() != self._pid or (on_gpu and _is_in_graph()) or is_traced()
        if is_weight(tensor) or not is_plain(tensor) or left:
            # A view of a weight without its history: with it, autograd's object would keep its own graph alive.
            return LeftTensor(tensor, tensor if tensor.grad_fn is None else tensor.detach(), NOT_COPIED)
        storage = tensor.untyped_storage()
        span = span_of(tensor, storage)
        if span.size < SMALLEST:
            self.left += span.size
            return LeftTensor(tensor, _copied(tensor) if self._copies else tensor.detach())
        identity = identity_of(tensor, storage, span)
        saved = self._identities.get(identity)
        if saved is None or (tensor.grad_fn is None and self.forward.index_of(saved) is None):
            # Also a tensor that no operation made and another forward has saved: who fills such memory again, by
            # NumPy or from another process, raises no version.
            saved = SavedStorage(tensor, storage, span)
            if self._copies:
                assert saved.memory is not None
                saved.memory, saved.versions = saved.memory.clone(), torch.empty(0, device=tensor.device)
            if self._unmap and not on_gpu:
                return_freed_memory()
            # As long as a weak reference is held, the address of the storage's own record is not given to another one.
            self._identities.put(identity, saved, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            at = Occurrence(self.forward, self._add(saved))
            self._admit(saved, at)
        else:
            index = self.forward.index_of(saved)
            at = Occurrence(self.forward, self._add(saved) if index is None else index)
        if on_gpu:
            # Once it is written its memory is free, although without offloading the graph would still hold it. So a
            # stream that uses it, and is not the one that it was allocated in, must be known to torch's allocator.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        saved.packs += 1
        return PackedTensor(tensor, saved, at)

    def unpack(self, packed: LeftTensor | PackedTensor) -> torch.Tensor:
        """The tensor that was packed; raises autograd's error if it was changed in place since."""
        if os.getpid() != self._pid and isinstance(packed, PackedTensor):
            raise OffloadError(
                f"activations that process {self._pid} has offloaded are needed in {os.getpid()}, which was forked "
                "from it and has none of its threads; run the backward in the process of its forward"
            )
        try:
            return self._unpack(packed)
        except RuntimeError as error:
            if NOTICED in str(error):  # a mistake of the script: our frames do not explain it
                raise error.with_traceback(None) from None
            raise

    def _unpack(self, packed: LeftTensor | PackedTensor) -> torch.Tensor:
        if isinstance(packed, LeftTensor):
            packed.check()
            return packed.tensor
        forward = packed.at.forward
        waited = forward.fetch_wait
        try:
            return self._store.unpack(packed)
        finally:
            if forward.times is not None and forward.fetch_wait > waited:
                forward.times.waited()

    def _add(self, saved: SavedStorage) -> int:
        return self.forward.add(saved, next_node_number())

    def _admit(self, saved: SavedStorage, at: Occurrence) -> None:
        away, compressed = self._match.takes_away(saved.size)
        if not away and self._store.keep(saved):
            return
        if saved.device.type == "cuda":
            # Blocking: a thread that waits for it sleeps, and leaves its processor to others.
            saved.ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            saved.ready.record(torch.cuda.current_stream(saved.device))
        waited = self.forward.pack_wait
        self._store.write(saved, at, compressed=compressed, sampled=self._match.step is None)
        if self.forward.times is not None and self.forward.pack_wait > waited:
            self.forward.times.waited()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() > span:  # elements share memory, as in an expanded one, and cannot be written one by one
        whole = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
        return whole.clone().as_strided(tensor.shape, tensor.stride(), 0)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def _is_in_graph() -> bool:
    """Return whether a CUDA graph is captured: a replay runs no hooks, and a capture allows no transfers."""
    if not records_graph():
        return False
    _tell_of_graphs()
    return True


@cache
def _tell_of_graphs() -> None:
    logger.warning("activations that a captured CUDA graph saves are not offloaded: they stay in the graph's memory")
