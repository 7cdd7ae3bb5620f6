"""Digests of what is in a state, by which ranks compare it without sending it."""

import ctypes
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from fastckpt._core.format.number_lists import pickled_numbers

_WORDS = 1 << 22
"""Words of 8 bytes that are added up at a time on a device."""


def digest_of(leaf: object) -> str:
    """The type and shape of an entry, and after a colon a digest of its bytes.

    Objects of other types are pickled: equal ones may have unlike digests.
    """
    if isinstance(leaf, torch.Tensor):
        return _digest_of_tensor(leaf)
    if (numbers := pickled_numbers(leaf)) is not None:
        return f"{type(leaf).__name__}:{xxhash.xxh3_128_hexdigest(numbers)}"
    if isinstance(leaf, Mapping):
        return f"dict:{len(leaf)}"  # an empty one, or one within a list, whose entries follow
    if isinstance(leaf, list | tuple):
        parts = [digest_of(each) for each in _flat(leaf)]
        return f"{type(leaf).__name__}:{xxhash.xxh3_128_hexdigest(' '.join(parts).encode())}"
    return f"{type(leaf).__name__}:{xxhash.xxh3_128_hexdigest(_bytes_of(leaf))}"


def _bytes_of(leaf: Any) -> bytes:
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return repr(leaf).encode()
    if hasattr(leaf, "__array_interface__"):  # of numpy
        return leaf.tobytes()  # type: ignore[no-any-return]
    try:
        return pickle.dumps(leaf)
    except Exception:  # noqa: BLE001  # an object may raise anything; a save says what is wrong with it
        return b""


def is_shard(leaf: object) -> bool:
    """Return whether a tensor is one of which ranks have parts, or wraps others."""
    return isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter)


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype}{tuple(tensor.shape)}"
    if is_shard(tensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"{kind}:"
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return f"{kind}:{_digest_of_bytes(whole) if whole.is_cpu else sum_of_words(whole)}"


def sum_of_words(tensor: torch.Tensor) -> str:
    """A sum of a tensor's bytes on its device, which no flip of one bit leaves as it was."""
    # Each word counts as often as an odd number says, modulo 2**64: a bit that flips changes the sum by a number that
    # is not 0, and words that change places change it, too.
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


def _flat(node: Any) -> Iterator[Any]:
    for child in node.values() if isinstance(node, Mapping) else node:
        if isinstance(child, Mapping | list | tuple):
            yield type(child).__name__
            yield sorted(map(str, child)) if isinstance(child, Mapping) else len(child)
            yield from _flat(child)
        else:
            yield child
