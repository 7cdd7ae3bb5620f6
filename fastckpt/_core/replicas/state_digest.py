"""Digests of the contents of a state, by which ranks compare it without sending it."""

import ctypes
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from fastckpt._core.format.number_lists import pickled_numbers
from fastckpt._core.torch_private.sharding import ShardedTensor

PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORDS = 1 << 22
"""Words of 8 bytes that are added up at a time on a device."""


def digest_of(leaf: object) -> str:
    """The type and shape of an entry, and after a colon a digest of its bytes.

    Objects of other types are pickled: equal ones may have unlike digests.
    """
    if isinstance(leaf, torch.Tensor):
        return _digest_of_tensor(leaf)
    if (numbers := pickled_numbers(leaf)) is not None:
        return f"{type(leaf).__name__}:{_digest(numbers)}"
    if isinstance(leaf, Mapping | list | tuple):
        return f"{type(leaf).__name__}:{_digest(' '.join(_parts_of(leaf)).encode())}"
    if hasattr(leaf, "__array_interface__"):  # of numpy
        array: Any = leaf
        return f"{type(leaf).__name__}{array.shape}{str(array.dtype).replace(':', ' ')}:{_digest(array.tobytes())}"
    return f"{type(leaf).__name__}:{_digest(_bytes_of(leaf))}"


def _bytes_of(leaf: Any) -> bytes:
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return repr(leaf).encode()
    try:
        return pickle.dumps(leaf)
    except Exception:  # noqa: BLE001  # an object may raise anything; a save reports its fault
        return b""


def is_shard(leaf: object) -> bool:
    """Return whether a tensor is one of which ranks have parts."""
    return isinstance(leaf, DTensor | ShardedTensor)


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype}{tuple(tensor.shape)}"
    if type(tensor) not in PLAIN:
        return f"{kind}:{_digest_of_subclass(tensor)}"
    if tensor.is_meta:
        return f"{kind}:"
    if tensor.is_quantized:
        return f"{kind}:{tensor.qscheme()} {_digest_of_tensor(tensor.int_repr())}"
    if tensor.layout is not torch.strided:
        return f"{kind}:{' '.join(map(_digest_of_tensor, _parts_of_sparse(tensor.detach())))}"
    # of an expanded one its memory: it may be of any size
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    whole = tensor.detach()[index].resolve_conj().resolve_neg().contiguous()
    return f"{kind}:{_digest_of_bytes(whole) if whole.is_cpu else sum_of_words(whole)}"


def _digest_of_subclass(tensor: torch.Tensor) -> str:
    if is_shard(tensor):
        return ""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return _digest_of_tensor(tensor.detach().as_subclass(torch.Tensor))
    if not hasattr(tensor, "__tensor_flatten__"):
        return ""  # one that wraps others, and does not name them
    names, _ = tensor.__tensor_flatten__()
    return " ".join(f"{name} {_digest_of_tensor(getattr(tensor, name))}" for name in names)


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)  # of oneDNN


def sum_of_words(tensor: torch.Tensor) -> str:
    """A sum of a tensor's bytes on its device, which no flip of one bit leaves as it was."""
    # Each word is multiplied by an odd number, modulo 2**64. So a bit that flips changes the sum by a number that is
    # not 0, and words that change places change it, too.
    data = tensor.reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].clone().view(torch.int64)  # aligned, as a view may not be
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _WORDS):
        piece = words[start : start + _WORDS]
        total += (piece * (torch.arange(start, start + piece.numel(), device=tensor.device) * 2 + 1)).sum()
    return f"{int(total):x} {data[whole:].tolist()}"


def _digest_of_bytes(tensor: torch.Tensor) -> str:
    # not by way of numpy: a storage that it has seen cannot be resized any more
    if not tensor.nbytes:
        return ""
    return xxhash.xxh3_128_hexdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _parts_of(node: Any) -> Iterator[str]:
    """Digests of all values in containers, with their types and keys; a text that is no digest begins with <."""
    keys = [*map(repr, node)] if isinstance(node, Mapping) else len(node)
    yield f"<{type(node).__name__} {keys}>"
    for child in node.values() if isinstance(node, Mapping) else node:
        is_container = isinstance(child, Mapping | list | tuple) and pickled_numbers(child) is None
        if is_container:
            yield from _parts_of(child)
        else:
            yield digest_of(child)
