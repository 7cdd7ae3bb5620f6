"""Tensors as bytes that can be copied in one piece."""

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def side_by_side(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with its elements side by side, a copy if need be; None if there is more to it than elements."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The part of its storage that holds the elements of a contiguous tensor; shares its memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return storage
    start = tensor.storage_offset() * tensor.itemsize
    part: torch.UntypedStorage = storage[start : start + tensor.nbytes]
    return part
