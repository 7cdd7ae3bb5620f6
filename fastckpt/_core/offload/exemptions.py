"""Tensors that are not offloaded: weights, and those that a copy of bytes would not restore."""

import torch
from torch.nn import Parameter

from fastckpt._core.torch_private.tensors import base_of, has_no_memory

SMALLEST = 1 << 20
"""Bytes below which a transfer costs more than the memory is worth."""
DEVICES = ("cpu", "cuda")


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one, such as the weight that a linear layer transposes.

    FSDP2 frees the memory of gathered parameters after the forward, and fills it again before the backward.
    """
    base = base_of(tensor)
    owner = tensor if base is None else base
    # A leaf that gets a gradient is a weight but for its class, as with torch.func.functional_call.
    return isinstance(tensor, Parameter) or isinstance(owner, Parameter) or (owner.is_leaf and owner.requires_grad)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is its bytes and its strides."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type not in DEVICES:
        return False
    # One of zeros, as forward-mode derivatives have them, has no memory.
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or has_no_memory(tensor))
